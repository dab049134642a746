"""A whole model, one pass at a time, eager or compiled: rows of model_times, and of cold_steps."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from cs336_systems import accounting
from cs336_systems.arguments import check_choice
from cs336_systems.attention.implementations import MODEL_ATTENTION
from cs336_systems.bench.attention_bench import why_no_attention
from cs336_systems.configs import ModelConfig
from cs336_systems.dtypes import DTYPES
from cs336_systems.model import build_model
from cs336_systems.training.steps import PASSES, ModelSteps
from labbook import timing
from labbook.machine import why_no_compile, why_no_memory
from labbook.rows import measured_in_order
from labbook.timing import Timing

Row = dict[str, Any]

# Empty in the key of what was seen in a step beside its time.
IMPLEMENTATIONS = ("eager", "compiled", "compiled_blocks")  # how a model's own code runs
OF_ANY_TIMING = {"pass": None, "warmup_steps": None}


def model_key(
    config: ModelConfig,
    context_length: int,
    batch_size: int,
    pass_: str | None = None,
    dtype: str = "float32",
    implementation: str = "eager",
    warmup_steps: int | None = None,
    attention_implementation: str = "plain",
) -> Row:
    """The key columns of a row about a model; `pass` and `warmup_steps` only where they are given."""
    key = {"implementation": implementation, "attention": attention_implementation}
    key |= {"edition": config.edition, "model_size": config.name}
    key |= {"d_model": config.d_model, "num_heads": config.num_heads}
    key |= {"batch_size": batch_size, "context_length": context_length, "dtype": dtype}
    key |= {"pass": pass_, "warmup_steps": warmup_steps}
    return {name: value for name, value in key.items() if value is not None}


def sweep_model(
    config: ModelConfig,
    *,
    context_lengths: Iterable[int],
    batch_size: int,
    passes: Iterable[str],
    dtypes: Iterable[str] = ("float32",),
    implementations: Iterable[str] = ("eager",),
    attention_implementation: str = "plain",
    device: str | torch.device = "auto",
    warmup_steps: int = 5,
    warmups: Iterable[int] = (),
    steps: int = 10,
) -> Iterator[list[Row]]:
    """Time every combination; yields the rows (model_times) of all passes at one of them at a time.

    Args:
        config: dimensions of the model, which is built once for each implementation.
        passes: "forward" (no gradients are recorded), "backward" (alone), "forward_backward", "train_step"
            (AdamW too). Gradients are set to None in each step.
        dtypes: "float32"; "tf32", float32 with TF32 matmuls; "bfloat16" or "float16", autocast.
        implementations: "eager"; "compiled", torch.compile of the whole model; or "compiled_blocks", of its
            blocks, which share the code compiled for one.
        attention_implementation: one of MODEL_ATTENTION.
        device: "auto", "cpu" or "cuda".
        warmup_steps, steps: as in `time_steps`.
        warmups: shorter warm-ups, each of which gets rows too, from the same run: what `steps` steps after so
            few would have shown.

    Raises:
        ValueError: a name is unknown or a number out of range. RuntimeError: the device is not there.
    """
    context_lengths, passes, dtypes = sorted(context_lengths), tuple(passes), tuple(dtypes)
    warmups = [*sorted({shorter for shorter in warmups if shorter < warmup_steps}), warmup_steps]
    for implementation in implementations:
        bench = ModelBenchmark(config, max(context_lengths), device, implementation, attention_implementation)
        ours = {"implementation": implementation, "attention_implementation": attention_implementation}
        for dtype, context_length in product(dtypes, context_lengths):
            run = {"batch_size": batch_size, "context_length": context_length, "dtype": dtype}

            def measure(bench=bench, ours=ours, run=run) -> list[Row]:
                timed = [(p, bench.time(p, **run, warmup_steps=warmup_steps, steps=steps)) for p in passes]
                return [
                    model_key(config, pass_=pass_, **run, **ours, warmup_steps=warmup)
                    | times.after_warmup(warmup, steps).as_row()
                    for pass_, times in timed
                    for warmup in warmups
                ]

            yield measured_in_order(measure)
        bench.release()


def cold_start_steps(
    config: ModelConfig,
    *,
    context_length: int,
    batch_size: int,
    passes: Iterable[str],
    dtype: str = "float32",
    attention_implementation: str = "plain",
    device: str | torch.device = "auto",
    steps: int = 15,
) -> Iterator[list[Row]]:
    """Time the first steps of a fresh process; yields the rows (cold_steps) of one process at a time.

    Each pass is timed twice: without waiting for the GPU (`synchronized` false, the classic mistake), and as
    it should be. Arguments as in `sweep_model`.
    """
    run = {"batch_size": batch_size, "context_length": context_length, "dtype": dtype}
    bench = ModelBenchmark(config, context_length, device, attention_implementation=attention_implementation)
    for pass_, synchronized in product(passes, (False, True)):
        how = {"warmup_steps": 0, "steps": steps, "synchronize": synchronized}
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            timed = fresh.submit(bench.time, pass_, **run, **how).result()
        key = model_key(config, pass_=pass_, **run, attention_implementation=attention_implementation)
        key |= {"synchronized": synchronized, "status": timed.status, "reason": timed.reason}
        trace = timed.step_ms or (None,)  # what cannot run has one row, which says why
        yield [key | {"step_index": index, "step_ms": ms} for index, ms in enumerate(trace)]


@dataclass
class ModelBenchmark:
    """One model on one device, to be timed at several passes, dtypes and context lengths.

    The model is built directly on the device, by the first measurement that needs it. Arguments as in
    `sweep_model`; context_length is the longest that it will be given.
    """

    config: ModelConfig
    context_length: int
    device: str | torch.device = "auto"
    implementation: str = "eager"
    attention_implementation: str = "plain"

    def __post_init__(self) -> None:
        check_choice("implementation", self.implementation, IMPLEMENTATIONS)
        check_choice("attention implementation", self.attention_implementation, MODEL_ATTENTION)
        self.device = timing.resolve_device(self.device)
        self.model: torch.nn.Module | None = None

    def time(
        self, pass_: str, *, batch_size: int, context_length: int, dtype: str = "float32", **how: Any
    ) -> Timing:
        """Time one pass over random tokens; `how` as in `time_steps`.

        Out of memory, while building too, and what the machine cannot do are a status.
        """
        check_choice("pass", pass_, PASSES)
        check_choice("dtype", dtype, DTYPES)
        if reason := self._why_not(pass_, batch_size, context_length, dtype):
            return Timing(status="skipped", reason=reason)
        if self.model is None:
            self.model, reason = timing.run_or_out_of_memory(self._build, self.device)
            if self.model is None:
                return Timing(status="oom", reason=f"building the model: {reason}")
        step, prepare = ModelSteps(self.model, batch_size, context_length, dtype).of(pass_)
        timer = timing.time_steps if self.implementation == "eager" else timing.time_compiled
        with timing.matmul_precision(dtype):
            timed = timer(step, device=self.device, prepare=prepare, **how)
        del step, prepare  # the optimizer's state goes with them
        self.model.zero_grad(set_to_none=True)
        timing.release_memory(self.device)
        return timed

    def release(self) -> None:
        """Give the model's memory back; another measurement builds it again."""
        self.model = None
        timing.release_memory(self.device)

    def _why_not(self, pass_: str, batch_size: int, context_length: int, dtype: str) -> str:
        attention = self.attention_implementation
        # The closed form is that of plain attention; the others need far less, but more than for one token.
        tokens = context_length if attention == "plain" else 1
        needed = accounting.peak_bytes(self.config, batch_size, tokens, pass_, dtype)
        return (
            why_no_attention(attention, dtype, self.device)
            or (why_no_compile(self.device) if self.implementation != "eager" else "")
            or why_no_memory(needed, self.device)
        )

    def _build(self) -> torch.nn.Module:
        attention = {"attention_implementation": self.attention_implementation}
        model = build_model(self.config, self.context_length, **attention, device=self.device)
        compiled = {"eager": [], "compiled": [model], "compiled_blocks": model.layers}
        for module in compiled[self.implementation]:
            module.compile(dynamic=False)
        return model
