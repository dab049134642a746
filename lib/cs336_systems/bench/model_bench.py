"""The key columns of a row about a model, for the benches that remain."""

from typing import Any

from cs336_systems.configs import ModelConfig

Row = dict[str, Any]

# Empty in the key of what was seen in a step beside its time.
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
