"""Training steps of a Transformer under each data-parallel wrapper, PyTorch's own among them, in one run."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cs336_systems.configs import ModelConfig
from cs336_systems.configs import model_size as find_size
from cs336_systems.measure.host import check_choice
from cs336_systems.measure.steps import ModelSteps
from cs336_systems.measure.timing import MIB, matmul_precision, release_memory, run_or_out_of_memory
from cs336_systems.measure.training import model_key
from cs336_systems.measure.vocabulary import DTYPES
from cs336_systems.model import build_model
from cs336_systems.parallel.collectives import time_together
from cs336_systems.parallel.ddp import FlatDDP, NaiveDDP
from cs336_systems.parallel.overlapped import BucketedDDP, OverlappedDDP
from cs336_systems.parallel.worker import WorkerContext
from cs336_systems.ranges import annotate


class TorchDDP(DistributedDataParallel):
    """PyTorch's own, with our interface: it averages during backward and leaves nothing to finish."""

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        super().__init__(module, bucket_cap_mb=bucket_size_mb, gradient_as_bucket_view=True)

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do."""


WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
    "torch": TorchDDP,
}
_WITH_BUCKETS = ("bucketed", "torch")


class DataParallelSteps(ModelSteps):
    """The passes of a wrapped model; the range "communication" is the wait for gradients after backward."""

    def __init__(self, wrapped: nn.Module, batch_size: int, context_length: int, dtype: str = "float32"):
        super().__init__(wrapped.module, batch_size, context_length, dtype)
        self.model = wrapped

    def train_step(self) -> None:
        """Forward, backward, the mean of the gradients, and AdamW."""
        self.forward_backward()
        self.communicate()
        self._update()

    def train_alone(self) -> None:
        """The same without communication, to see how much of it a step does not hide."""
        with self.model.no_sync():
            self.forward_backward()
        self._update()

    def communicate(self) -> None:
        """Average whatever has not been averaged; after a pass under no_sync(), that is everything."""
        with annotate("communication"):
            self.model.finish_gradient_synchronization()

    def _update(self) -> None:
        with annotate("optimizer"):
            self.optimizer.step()


def benchmark_ddp(
    context: WorkerContext,
    *,
    model_size: str = "tiny",
    edition: int = 2025,
    context_length: int = 128,
    batch_size: int = 4,
    dtype: str = "float32",
    implementations: Iterable[str] = tuple(WRAPPERS),
    bucket_sizes_mb: Iterable[float] = (1, 10, 100, 1000),
    attention_implementation: str = "reference",
    warmup_steps: int = 5,
    steps: int = 10,
) -> list[dict[str, Any]]:
    """A worker for `launch`: time training steps under each wrapper, one row for each and each bucket size.

    Of every step the slowest rank counts. Beside the times of the whole step, a row has medians of:
    `alone_ms`, a step without communication; `exposed_communication_ms`, by how much the step is longer
    than that; `communication_ms`, all communication with nothing to hide behind (None for "torch", which
    cannot be asked).

    Args:
        batch_size: sequences in the global batch, shared equally by the ranks.
        implementations: names in WRAPPERS; "bucketed" and "torch" run with every bucket size.

    Returns:
        The rows, the same on every rank. Memory that ran out is a status, and what was to follow is skipped:
        after that the ranks need not agree on what they have sent.

    Raises:
        ValueError: a name is unknown, or the batch cannot be shared equally.
    """
    config = find_size(model_size, edition)
    implementations, bucket_sizes_mb = tuple(implementations), tuple(bucket_sizes_mb)
    check_choice("dtype", dtype, DTYPES)
    for implementation in implementations:
        check_choice("implementation", implementation, WRAPPERS)
    if batch_size % context.world_size:
        raise ValueError(
            f"batch_size {batch_size} cannot be shared by {context.world_size} ranks; allowed: its multiples"
        )
    shared_key = model_key(config, context_length, batch_size, "train_step", dtype, warmup_steps=warmup_steps)
    shared_key |= {"attention": attention_implementation}
    shared_key |= {"world_size": context.world_size, "backend": context.backend}
    rows, out_of_memory = [], False
    for implementation in implementations:
        for bucket_size_mb in bucket_sizes_mb if implementation in _WITH_BUCKETS else (None,):
            key = shared_key | {"implementation": implementation, "bucket_size_mb": bucket_size_mb}
            if out_of_memory:
                values = {"status": "skipped", "reason": "memory ran out in the same process group"}
            else:
                values = _measure(context, config, key, steps)
            out_of_memory |= values["status"] == "oom"
            rows.append(key | values)
    return rows


def _measure(context: WorkerContext, config: ModelConfig, key: dict[str, Any], steps: int) -> dict[str, Any]:
    """The value columns of one row; out of memory on any rank is the status on all."""
    with matmul_precision(key["dtype"]):
        values, reason = run_or_out_of_memory(lambda: _time(context, config, key, steps), context.device)
    release_memory(context.device)  # a wrapper and its hooks refer to each other
    reasons: list[str] = [""] * context.world_size
    dist.all_gather_object(reasons, reason)
    if any(reasons):
        return {"status": "oom", "reason": next(filter(None, reasons))}
    return values


def _time(context: WorkerContext, config: ModelConfig, key: dict[str, Any], steps: int) -> dict[str, Any]:
    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(context.device)
    model = build_model(
        config,
        key["context_length"],
        attention_implementation=key["attention"],
        device=context.device,
    )
    buckets = {} if key["bucket_size_mb"] is None else {"bucket_size_mb": key["bucket_size_mb"]}
    wrapped = WRAPPERS[key["implementation"]](model, **buckets)
    share = key["batch_size"] // context.world_size
    run = DataParallelSteps(wrapped, share, key["context_length"], key["dtype"])
    counts = {"warmup_steps": key["warmup_steps"], "steps": steps}
    together = time_together(run.train_step, context, **counts)
    peak = torch.cuda.max_memory_allocated(context.device) / MIB if on_gpu else None
    alone = time_together(run.train_alone, context, **counts)
    communication = None
    if key["implementation"] != "torch":
        communication = time_together(run.communicate, context, **counts).p50_ms
    return together.as_row() | {
        "peak_memory_mib": peak,
        "alone_ms": alone.p50_ms,
        "exposed_communication_ms": together.p50_ms - alone.p50_ms,
        "communication_ms": communication,
    }
