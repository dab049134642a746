"""Benchmarks of a whole model: one pass at a time, eager or compiled, every configuration a row."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from cs336_systems import accounting
from cs336_systems.attention import IMPLEMENTATIONS as ATTENTION
from cs336_systems.configs import ModelConfig
from cs336_systems.measure.compiling import time_compiled, why_no_compile, why_no_triton
from cs336_systems.measure.host import check_choice, why_no_memory, why_no_tf32
from cs336_systems.measure.model_steps import ModelSteps
from cs336_systems.measure.schema import DTYPES, PASSES
from cs336_systems.measure.timing import (
    Timing,
    matmul_precision,
    release_memory,
    resolve_device,
    run_or_out_of_memory,
    time_steps,
)
from cs336_systems.measure.validation import measured_in_order
from cs336_systems.model import build_model

IMPLEMENTATIONS = ("eager", "compiled", "compiled_blocks")

Cell = list[tuple[dict[str, Any], Timing]]


class ModelBenchmark:
    """One model on one device, to be timed at several passes, dtypes and context lengths.

    The model is built directly on the device, by the first measurement that needs it.

    Args:
        config: dimensions of the model.
        context_length: the longest context it will be given.
        device: "auto", "cpu" or "cuda".
        implementation: "eager"; "compiled", torch.compile of the whole model; or "compiled_blocks", of its
            blocks, which share the code compiled for one.
        attention_implementation: "auto" or a name in `cs336_systems.attention.IMPLEMENTATIONS`.

    Raises:
        ValueError: a name is unknown. RuntimeError: the device is not there.
    """

    def __init__(
        self,
        config: ModelConfig,
        context_length: int,
        *,
        device: str | torch.device = "auto",
        implementation: str = "eager",
        attention_implementation: str = "reference",
    ):
        check_choice("implementation", implementation, IMPLEMENTATIONS)
        check_choice("attention implementation", attention_implementation, ("auto", *ATTENTION))
        self.config = config
        self.context_length = context_length
        self.device = resolve_device(device)
        self.implementation = implementation
        self.attention_implementation = attention_implementation
        self._model: torch.nn.Module | None = None

    def time(
        self,
        pass_: str,
        *,
        batch_size: int,
        context_length: int | None = None,
        dtype: str = "float32",
        warmup_steps: int = 5,
        steps: int = 10,
        synchronize: bool = True,
    ) -> Timing:
        """Time one pass over random tokens.

        Args:
            pass_: "forward" (no gradients are recorded), "backward" (alone), "forward_backward", or
                "train_step" (AdamW too). Gradients are set to None in each step.
            batch_size: sequences in a batch.
            context_length: tokens in a sequence; the longest by default.
            dtype: "float32"; "tf32", float32 with TF32 matrix products; "bfloat16" or "float16", autocast.
            warmup_steps, steps, synchronize: as in `time_steps`.

        Returns:
            The timing. Out of memory, while building too, and what the machine cannot do are a status.

        Raises:
            ValueError: a name is unknown or a number out of range.
        """
        context_length = self.context_length if context_length is None else context_length
        check_choice("pass", pass_, PASSES)
        check_choice("dtype", dtype, DTYPES)
        if reason := self._why_not(pass_, batch_size, context_length, dtype):
            return Timing(status="skipped", reason=reason)
        if self._model is None:
            self._model, reason = run_or_out_of_memory(self._build, self.device)
            if self._model is None:
                return Timing(status="oom", reason=f"building the model: {reason}")
        step, prepare = ModelSteps(self._model, batch_size, context_length, dtype).of(pass_)
        options = {"warmup_steps": warmup_steps, "steps": steps, "synchronize": synchronize}
        with matmul_precision(dtype):
            timing = time_compiled if self.implementation != "eager" else time_steps
            result = timing(step, device=self.device, prepare=prepare, **options)
        del step, prepare  # the optimizer's state goes with them
        self._model.zero_grad(set_to_none=True)
        release_memory(self.device)
        return result

    def release(self) -> None:
        """Give the model's memory back; another measurement builds it again."""
        self._model = None
        release_memory(self.device)

    def _why_not(self, pass_: str, batch_size: int, context_length: int, dtype: str) -> str:
        if dtype == "tf32" and (reason := why_no_tf32(self.device)):
            return reason
        if self.implementation != "eager" and (reason := why_no_compile(self.device)):
            return reason
        if self.attention_implementation == "flash_triton" and (reason := why_no_triton(self.device)):
            return reason
        needed = accounting.peak_bytes(self.config, batch_size, context_length, pass_, dtype)
        # The closed form is that of reference attention; the others need far less.
        return why_no_memory(needed, self.device) if self.attention_implementation == "reference" else ""

    def _build(self) -> torch.nn.Module:
        model = build_model(
            self.config,
            self.context_length,
            attention_implementation=self.attention_implementation,
            device=self.device,
        )
        if self.implementation == "compiled":
            model.compile(dynamic=False)
        elif self.implementation == "compiled_blocks":
            for block in model.layers:
                block.compile(dynamic=False)
        return model


def benchmark_model(
    config: ModelConfig,
    *,
    context_length: int,
    batch_size: int,
    pass_: str,
    dtype: str = "float32",
    device: str | torch.device = "auto",
    warmup_steps: int = 5,
    steps: int = 10,
    implementation: str = "eager",
    attention_implementation: str = "reference",
    synchronize: bool = True,
) -> Timing:
    """Time one configuration with a model of its own; see `ModelBenchmark` and its `time`."""
    benchmark = ModelBenchmark(
        config,
        context_length,
        device=device,
        implementation=implementation,
        attention_implementation=attention_implementation,
    )
    timing = benchmark.time(
        pass_,
        batch_size=batch_size,
        dtype=dtype,
        warmup_steps=warmup_steps,
        steps=steps,
        synchronize=synchronize,
    )
    benchmark.release()
    return timing


def model_key(
    config: ModelConfig,
    context_length: int,
    batch_size: int,
    pass_: str,
    dtype: str,
    implementation: str = "eager",
    warmup_steps: int = 5,
    attention_implementation: str = "reference",
) -> dict[str, Any]:
    """The key columns of a model's row."""
    return {
        "implementation": implementation,
        "attention": attention_implementation,
        "edition": config.edition,
        "model_size": config.name,
        "d_model": config.d_model,
        "num_heads": config.num_heads,
        "batch_size": batch_size,
        "context_length": context_length,
        "dtype": dtype,
        "pass": pass_,
        "warmup_steps": warmup_steps,
    }


def sweep_model(
    config: ModelConfig,
    *,
    context_lengths: Iterable[int],
    batch_size: int,
    passes: Iterable[str],
    dtypes: Iterable[str] = ("float32",),
    implementations: Iterable[str] = ("eager",),
    attention_implementation: str = "reference",
    device: str | torch.device = "auto",
    warmup_steps: int = 5,
    steps: int = 10,
) -> Iterator[Cell]:
    """Time every combination with one model an implementation, one cell after the other.

    A cell is all passes of one (implementation, dtype, context length): pairs of key columns and `Timing`.
    Save each as it comes, and a killed run keeps what it has:

        for cell in sweep_model(config, ...):
            save_rows([key | timing.as_row() for key, timing in cell], slug)
    """
    context_lengths, passes, dtypes = sorted(context_lengths), tuple(passes), tuple(dtypes)
    for implementation in implementations:
        benchmark = ModelBenchmark(
            config,
            max(context_lengths),
            device=device,
            implementation=implementation,
            attention_implementation=attention_implementation,
        )
        for dtype in dtypes:
            for context_length in context_lengths:
                run = {"batch_size": batch_size, "context_length": context_length, "dtype": dtype}
                yield _time_passes(benchmark, passes, run, warmup_steps, steps)
        benchmark.release()


def _time_passes(
    benchmark: ModelBenchmark, passes: tuple[str, ...], run: dict[str, Any], warmup_steps: int, steps: int
) -> Cell:
    names = {
        "implementation": benchmark.implementation,
        "attention_implementation": benchmark.attention_implementation,
        "warmup_steps": warmup_steps,
    }
    keys = [model_key(benchmark.config, pass_=pass_, **run, **names) for pass_ in passes]
    return measured_in_order(
        lambda: [
            (key, benchmark.time(key["pass"], **run, warmup_steps=warmup_steps, steps=steps)) for key in keys
        ],
        as_row=lambda measured: measured[0] | measured[1].as_row(),
    )
