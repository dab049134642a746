"""Profile a model of the workbook with the best profiler that the machine has.

    python -m cs336_systems.bench.profile_bench --model-size small --context-length 256 --pass train_step

runs the steps and says to a profiler around it (nsys) when the measured ones begin and end.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cs336_systems import accounting
from cs336_systems.arguments import check_choice
from cs336_systems.bench.model_bench import model_key
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.nvtx import annotate, recording
from cs336_systems.training.steps import ModelSteps
from labbook import timing
from labbook.machine import why_no_memory
from labbook.profiles import nsys, torch_trace
from labbook.profiles.table import Profile, ProfileError, kernel_rows, kernel_table, range_table
from labbook.timing import matmul_precision, resolve_device

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """What is profiled: a few steps of one pass of one model, after a warm-up that is not recorded."""

    model_size: str = "tiny"
    edition: int = 2025
    context_length: int = 64
    batch_size: int = 4
    pass_: str = "train_step"
    dtype: str = "float32"
    device: str = "auto"
    warmup_steps: int = 5
    steps: int = 3

    def key(self) -> dict[str, Any]:
        """The key columns of its rows, but for the profiler."""
        config = model_size(self.model_size, self.edition)
        shape = self.context_length, self.batch_size, self.pass_, self.dtype
        return model_key(config, *shape, warmup_steps=self.warmup_steps)


def option(name: str) -> str:
    """The command line's word for a field of Target."""
    return f"--{name.strip('_').replace('_', '-')}"


def choose_source(device: torch.device, source: str = "auto") -> str:
    """ "nsys" on a GPU where nsys works, else "torch"; or the one that is asked for.

    Raises:
        ValueError: the source is unknown, or nsys is asked for without a GPU.
    """
    check_choice("source", source, ("auto", "nsys", "torch"))
    if source == "nsys" and device.type != "cuda":
        raise ValueError(f"source 'nsys' sees GPU kernels only; allowed on a {device.type}: auto, torch")
    if source == "auto":
        return "torch" if device.type != "cuda" or nsys.why_no_nsys() else "nsys"
    return source


def profile_model(target: Target, stem: Path, source: str = "auto") -> Profile:
    """Profile a target; leaves <stem>.nsys-rep and .sqlite, or <stem>.json for ui.perfetto.dev.

    nsys runs the target in a process of its own: give this one's GPU memory back first.

    Raises:
        torch.OutOfMemoryError: the target does not fit, in this process or in the other.
        ValueError, RuntimeError, ProfileError: see `choose_source`, `nsys.record` and `torch_trace.record`.
    """
    device = resolve_device(target.device)
    if choose_source(device, source) == "torch":
        with matmul_precision(target.dtype):
            return torch_trace.record(prepare(target), stem.with_name(stem.name + ".json"), device=device)
    options = [f"{option(name)}={value}" for name, value in asdict(target).items()]
    command = [sys.executable, "-m", "cs336_systems.bench.profile_bench", *options]
    try:
        return nsys.read_export(nsys.record(command, stem))
    except ProfileError as error:
        if "out of memory" in str(error).lower():
            raise torch.OutOfMemoryError(str(error)) from None
        raise


def profile_rows(target: Target, source: str = "auto", *, keep: Path | None = None) -> dict[str, Rows]:
    """Profile a target. Returns the rows of the tables "kernels" and "ranges"; what cannot run is a status.

    Args:
        keep: a .json.gz for the trace of one step, where torch.profiler is the source.

    Raises:
        ValueError, RuntimeError: see `choose_source`; the device is not there.
    """
    device = resolve_device(target.device)
    source = choose_source(device, source)
    key = target.key() | {"profiler": source if source == "nsys" else f"torch {device.type}"}
    tables = _profiled(target, device, source, keep)
    return {table: [key | row for row in rows] for table, rows in tables.items()}


def _profiled(target: Target, device: torch.device, source: str, keep: Path | None) -> dict[str, Rows]:
    def failed(status: str, reason: str) -> dict[str, Rows]:
        return {table: [{"status": status, "reason": reason}] for table in ("kernels", "ranges")}

    config, shape = model_size(target.model_size, target.edition), (target.batch_size, target.context_length)
    needed = accounting.peak_bytes(config, *shape, target.pass_, target.dtype)
    if reason := why_no_memory(needed, device):
        return failed("skipped", reason)
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder) / "profile"
        try:
            found, reason = timing.run_or_out_of_memory(lambda: profile_model(target, stem, source), device)
        except ProfileError as error:
            return failed("error", str(error))
        finally:
            timing.release_memory(device)
        if found is None:
            return failed("oom", reason)
        if keep and source == "torch":
            torch_trace.keep_one_step(stem.with_suffix(".json"), keep)
    return {"kernels": kernel_rows(kernel_table(found)), "ranges": range_table(found).to_dict("records")}


def prepare(target: Target) -> Callable[[], None]:
    """Build and warm up; what is returned runs the measured steps, each in a range `measure`, ranges on."""
    device, config = resolve_device(target.device), model_size(target.model_size, target.edition)
    model = build_model(config, target.context_length, device=device)
    steps = ModelSteps(model, target.batch_size, target.context_length, target.dtype)
    step, before = steps.of(target.pass_)

    def run(count: int) -> None:
        for _ in range(count):
            argument = () if before is None else (before(),)
            _synchronize(device)
            with annotate("measure"):
                step(*argument)
                _synchronize(device)

    def measured() -> None:
        with recording(model):
            run(target.steps)

    run(target.warmup_steps)
    return measured


def main(arguments: list[str] | None = None) -> None:
    """Run a target, with cudaProfilerStart and -Stop around its measured steps."""
    parser = argparse.ArgumentParser(prog="cs336_systems.bench.profile_bench", description=Target.__doc__)
    for name, value in asdict(Target()).items():
        parser.add_argument(option(name), dest=name, type=type(value), default=value)
    target = Target(**vars(parser.parse_args(arguments)))
    with matmul_precision(target.dtype):
        measured = prepare(target)
        on_cuda = resolve_device(target.device).type == "cuda"
        with torch.cuda.profiler.profile() if on_cuda else nullcontext():
            measured()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
