"""Timing: warm-up apart, every step synchronised, and running out of memory a result instead of a crash."""

import errno
import gc
import re
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

# Counts as code of every row: raise it when the same step would get other numbers than before, from here,
# from bench or ranks, or from what else reads a clock or a memory for a row (memory, profiles).
VERSION = "1"
MIB = 2**20
# A step longer than this finds the cache cold anyway, and is repeated SLOW_STEPS times only.
SLOW_MS = 30
SLOW_STEPS = 3
CPU_STEPS = 5


@dataclass(frozen=True)
class Timing:
    """Times of single steps, in milliseconds; a status other than "ok" has none and says why in `reason`."""

    step_ms: tuple[float, ...] = ()
    status: str = "ok"
    reason: str = ""
    peak_memory_mib: float | None = None
    compile_s: float | None = None

    @property
    def steps(self) -> int:
        return len(self.step_ms)

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.step_ms)

    def as_row(self) -> dict:
        """The value columns of a row; without times where there are none."""
        row = asdict(self)
        times_ms = row.pop("step_ms")
        if self.status == "ok":
            row["mean_ms"] = statistics.fmean(times_ms)
            row["std_ms"] = statistics.stdev(times_ms) if self.steps > 1 else None
            row["p20_ms"], row["p80_ms"] = np.percentile(times_ms, (20, 80)).tolist()
            row["p50_ms"] = self.p50_ms
            row["steps"] = self.steps
        return row


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Turn "auto" (CUDA where there is one), "cpu" or "cuda" into a device.

    Raises RuntimeError: CUDA is asked for and not there.
    """
    has_gpu = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    device = torch.device(device)
    if device.type != "cpu" and not has_gpu:
        raise RuntimeError(
            f"{device} is asked for, but torch sees no CUDA GPU here; allowed: auto, cpu"
        )
    return device


@contextmanager
def matmul_precision(dtype: str) -> Iterator[None]:
    """Allow TF32 in float32 matmuls for "tf32" and for no other dtype; restore it afterwards."""
    switch = torch.backends.cuda.matmul
    newer = switch.fp32_precision
    older = "highest"
    # The older switch refuses to answer where the newer one says something else.
    with suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        switch.fp32_precision = newer


def clock_ms(step: Callable, device: torch.device, *arguments, synchronize: bool = True) -> float:
    """Milliseconds of `step(*arguments)`: between two CUDA events on a GPU, by the wall clock on a CPU.

    The events are in the current stream, which waits for what was communicated on others. What the step
    returns is freed after the clock has stopped. synchronize: as in `time_steps`.
    """
    wait_for(device)
    if device.type == "cuda" and synchronize:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        _result = step(*arguments)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    start_s = time.perf_counter()
    _result = step(*arguments)
    ms = (time.perf_counter() - start_s) * 1e3
    wait_for(device)
    return ms


def time_steps(
    step: Callable,
    *,
    device: str | torch.device,
    warmup_steps: int = 5,
    steps: int = 10,
    prepare: Callable | None = None,
    synchronize: bool = True,
) -> Timing:
    """Time single steps: CUDA events on a GPU, the wall clock on a CPU.

    step: what is timed; it is passed what `prepare` returned, or nothing where there is no `prepare`.
    device: where the step runs.
    warmup_steps: steps run first, which do not count.
    steps: measured steps.
    prepare: run before each step, warm-up included, outside the measured time.
    synchronize: False makes the classic mistake on purpose: on a GPU the clock stops when the kernels of
        the step are launched, long before they are done.
    Returns the timing; with status "oom" where memory ran out (it is given back). Other errors propagate.
    """
    device = resolve_device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)

    def one_step_ms(_):
        arguments = () if prepare is None else (prepare(),)
        return clock_ms(step, device, *arguments, synchronize=synchronize)

    # The milliseconds of each step. `map` runs none until `list` asks, where running out of memory is caught.
    repeat = partial(map, one_step_ms, range(warmup_steps + steps))
    times, reason = run_or_out_of_memory(lambda: list(repeat()), device)
    if times is None:
        return Timing(status="oom", reason=reason)
    peak = torch.cuda.max_memory_allocated(device) / MIB if device.type == "cuda" else None
    return Timing(tuple(times[warmup_steps:]), peak_memory_mib=peak)


# How CUDA's allocator, its libraries, C++ and the operating system say that memory ran out.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|alloc_?failed|bad_alloc|not enough memory|memory allocation fail"
    r"|(can.?t|cannot|could not|unable to|failed to) (be )?allocate|resource_?exhausted",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether an error, or its message, says that memory ran out, in whichever library's words."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError | str) and bool(_OUT_OF_MEMORY.search(str(error)))


def run_or_out_of_memory(function: Callable, device: torch.device) -> tuple:
    """`(function(), "")`, or `(None, reason)` when memory ran out, with that memory given back."""
    try:
        return function(), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = one_line(error)
        # Empty the frames that it keeps alive: they hold the tensors of the step.
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
    # Only here, with the exception gone, does nothing hold on to the tensors of the step that failed.
    release_memory(device)
    return None, reason


def one_line(error: BaseException) -> str:
    """An error as the reason in a row."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def release_memory(device: str | torch.device) -> None:
    """Collect what nothing refers to any more, and hand the GPU's memory back: cache and cuBLAS's workspaces.

    Up to PyTorch 2.14 cuBLAS keeps a workspace for each thread, 32 MiB on Hopper; a peak must not depend on
    what ran before.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_compiled(step: Callable, **options) -> Timing:
    """`time_steps` of a step with compiled code inside, and `compile_s`: its first call less a steady one.

    It is compiled afresh, with empty caches and nothing left over from other configurations, so that the time
    is what a new user waits. Code that cannot be compiled gives the status "error".
    """
    # Imported here: the compiler imports triton, and that settles for good whether kernels are interpreted.
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    try:
        with fresh_cache(), warnings.catch_warnings():
            # Whether TF32 is allowed is what is being compared.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            first = time_steps(step, **options | {"warmup_steps": 0, "steps": 1})
            timing = time_steps(step, **options) if first.status == "ok" else first
    except TorchDynamoException as error:
        return Timing(status="error", reason=one_line(error))
    if timing.status != "ok":
        return timing
    return replace(timing, compile_s=max(0.0, first.p50_ms - timing.p50_ms) / 1e3)


def time_cold_cache(
    step: Callable,
    *,
    device: torch.device,
    to_clear: Iterable[Tensor] = (),
    warmup_ms: float = 10,
    repeat_ms: float = 40,
) -> Timing:
    """Times of a step, the L2 cache flushed before each repetition (triton.testing.do_bench).

    Its peak memory is that of the first four calls, those that compile among them, without the buffer that
    flushes the cache.

    to_clear: tensors whose gradients are dropped before each repetition.
    warmup_ms, repeat_ms: about how long the step runs, uncounted and counted. A CPU, which is timed by
        the clock and with whatever its caches hold, takes one step and then CPU_STEPS.
    Returns the timing; with status "oom" where memory ran out. Other errors propagate.
    """
    to_clear = list(to_clear)

    def clear():
        for tensor in to_clear:
            tensor.grad = None

    few = partial(time_steps, lambda _: step(), device=device, prepare=clear)
    if device.type == "cpu":
        return few(warmup_steps=1, steps=CPU_STEPS)
    first = few(warmup_steps=3, steps=1)
    if first.status != "ok":
        return first
    if first.p50_ms > SLOW_MS:
        return replace(few(warmup_steps=0, steps=SLOW_STEPS), peak_memory_mib=first.peak_memory_mib)
    from triton.testing import do_bench  # settles for good whether kernels are interpreted

    times = do_bench(
        step, warmup=warmup_ms, rep=repeat_ms, grad_to_none=to_clear, return_mode="all"
    )
    return Timing(tuple(times), peak_memory_mib=first.peak_memory_mib)
