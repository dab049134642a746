"""Timing: warm-up apart, every step synchronised, and running out of memory a result instead of a crash."""

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

MIB = 2**20


@dataclass(frozen=True)
class Timing:
    """Times of single steps, in milliseconds; a status other than "ok" has none and says why in `reason`."""

    step_ms: tuple[float, ...] = ()
    warmup_ms: tuple[float, ...] = ()
    status: str = "ok"
    reason: str = ""
    peak_memory_mib: float | None = None
    compile_s: float | None = None

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.step_ms)

    @property
    def std_ms(self) -> float:
        """Sample standard deviation; not a number for a single step."""
        return statistics.stdev(self.step_ms) if self.steps > 1 else float("nan")

    @property
    def p20_ms(self) -> float:
        return self._percentile(20)

    @property
    def p50_ms(self) -> float:
        return self._percentile(50)

    @property
    def p80_ms(self) -> float:
        return self._percentile(80)

    @property
    def steps(self) -> int:
        return len(self.step_ms)

    def as_row(self) -> dict[str, Any]:
        """The value columns of a row."""
        times = ("mean_ms", "std_ms", "p20_ms", "p50_ms", "p80_ms", "steps")
        return {
            **{name: getattr(self, name) if self.status == "ok" else None for name in times},
            "peak_memory_mib": self.peak_memory_mib,
            "compile_s": self.compile_s,
            "status": self.status,
            "reason": self.reason,
        }

    def after_warmup(self, warmup_steps: int, steps: int | None = None) -> "Timing":
        """What a run with `warmup_steps` would have reported: one cold start answers for any shorter warm-up.

        Args:
            warmup_steps: steps at the start of the run to leave out.
            steps: steps to keep after them; all by default.
        """
        if self.status != "ok":
            return self
        trace = self.warmup_ms + self.step_ms
        steps = len(trace) - warmup_steps if steps is None else steps
        if warmup_steps < 0 or steps < 1 or warmup_steps + steps > len(trace):
            raise ValueError(
                f"warmup_steps={warmup_steps}, steps={steps} of a trace of {len(trace)}; "
                "allowed: 0 or more, 1 or more, and together no more than the trace has"
            )
        return replace(
            self, warmup_ms=trace[:warmup_steps], step_ms=trace[warmup_steps : warmup_steps + steps]
        )

    def _percentile(self, q: float) -> float:
        return float(np.percentile(self.step_ms, q))


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Turn "auto" (CUDA where there is one), "cpu" or "cuda" into a device.

    Raises:
        RuntimeError: CUDA is asked for and not there, or a GPU that is not the current one.
        ValueError: another device.
    """
    name = str(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device {name!r} is unknown; allowed: auto, cpu, cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device 'cuda' is asked for, but torch sees no CUDA GPU here; allowed: auto, cpu")
    if kind == "cuda" and index and int(index) != torch.cuda.current_device():  # events would time the other
        raise RuntimeError(
            f"device {name!r} is asked for, and cuda:{torch.cuda.current_device()} is the current one; "
            "allowed: auto, cpu, cuda (for another GPU call torch.cuda.set_device first)"
        )
    return torch.device(name)


@contextmanager
def matmul_precision(dtype: str) -> Iterator[None]:
    """Allow TF32 in float32 matmuls for "tf32" and for no other dtype; restore it afterwards."""
    newer_switch = torch.backends.cuda.matmul
    newer = newer_switch.fp32_precision
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # this one refuses to answer where the newer one says something else
        older = "highest"
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        newer_switch.fp32_precision = newer


def time_steps(
    step: Callable[..., Any],
    *,
    device: str | torch.device,
    warmup_steps: int = 5,
    steps: int = 10,
    prepare: Callable[[], Any] | None = None,
    synchronize: bool = True,
) -> Timing:
    """Time single steps: CUDA events on a GPU, the wall clock on a CPU.

    Args:
        step: what is timed; it is passed what `prepare` returned, or nothing where there is no `prepare`.
        device: where the step runs.
        warmup_steps: steps run and kept apart first (`Timing.warmup_ms`).
        steps: measured steps.
        prepare: run before each step, warm-up included, outside the measured time.
        synchronize: False makes the classic mistake on purpose: on a GPU the clock stops when the kernels of
            the step are launched, long before they are done.

    Returns:
        The timing; with status "oom" where memory ran out (it is given back). Other errors propagate.

    Raises:
        ValueError: no measured steps, or a negative number of warm-up steps.
    """
    if warmup_steps < 0 or steps < 1:
        raise ValueError(f"warmup_steps={warmup_steps}, steps={steps}; allowed: 0 or more, and 1 or more")
    device = resolve_device(device)
    measure = _time_events if device.type == "cuda" and synchronize else _time_wall_clock
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    times, reason = run_or_out_of_memory(
        lambda: [_one_step(step, prepare, measure, device) for _ in range(warmup_steps + steps)], device
    )
    if times is None:
        return Timing(status="oom", reason=reason)
    peak = torch.cuda.max_memory_allocated(device) / MIB if device.type == "cuda" else None
    return Timing(tuple(times[warmup_steps:]), tuple(times[:warmup_steps]), peak_memory_mib=peak)


def run_or_out_of_memory(function: Callable[[], Any], device: torch.device) -> tuple[Any, str]:
    """`(function(), "")`, or `(None, reason)` when memory ran out, with that memory given back."""
    reason = ""
    try:
        return function(), reason
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = one_line(error)
        _clear_frames(error)
    # Only here, with the exception gone, does nothing hold on to the tensors of the step that failed.
    release_memory(device)
    return None, reason


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's allocator, the CPU's, a library's workspace or Python itself could not get memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    signs = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def one_line(error: BaseException) -> str:
    """An error as the reason in a row."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def release_memory(device: str | torch.device) -> None:
    """Collect what nothing refers to any more, and hand the GPU's memory back: cache and cuBLAS's workspaces.

    cuBLAS keeps a workspace for each thread, 32 MiB on Hopper; a peak must not depend on what ran before.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _clear_frames(error: BaseException | None) -> None:
    """Empty the frames that an exception keeps alive: their variables hold the tensors of the failed step."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _one_step(step: Callable, prepare: Callable | None, measure: Callable, device: torch.device) -> float:
    arguments = () if prepare is None else (prepare(),)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ms = measure(step, arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return ms


def _time_wall_clock(step: Callable, arguments: tuple) -> float:
    start = time.perf_counter()
    result = step(*arguments)
    seconds = time.perf_counter() - start
    del result  # freeing it is not the step's work, so it waits until the clock has stopped
    return seconds * 1e3


def _time_events(step: Callable, arguments: tuple) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = step(*arguments)
    end.record()
    end.synchronize()
    del result  # as above
    return start.elapsed_time(end)
