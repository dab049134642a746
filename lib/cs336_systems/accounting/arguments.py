"""The vocabulary of the closed forms, and the refusal of anything else."""

from numbers import Integral, Real

# The width of a tensor in the arithmetic's type. "tf32" is float32 in memory: only the matrix units round it.
DTYPE_BYTES = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}

FLOAT32_BYTES = DTYPE_BYTES["float32"]

PASSES = ("forward", "backward", "forward_backward", "train_step")


def check_positive_integers(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be a positive integer; got {value!r}")


def check_positive_numbers(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, Real) or not value > 0:
            raise ValueError(f"{name} must be a positive number; got {value!r}")


def check_pass(pass_: str) -> None:
    if pass_ not in PASSES:
        raise ValueError(f"pass {pass_!r} is unknown; allowed: {', '.join(PASSES)}")


def dtype_bytes(dtype: str) -> int:
    """Bytes per element.

    Raises:
        ValueError: the type is not in DTYPE_BYTES; the message lists what is.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is unknown; allowed: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
