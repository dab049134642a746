"""What the closed forms accept, and the refusal of anything else."""

from numbers import Integral, Real

from cs336_systems import names

DTYPE_BYTES = {name: dtype.bytes for name, dtype in names.DTYPES.items()}
FLOAT32_BYTES = DTYPE_BYTES["float32"]


def check_positive_integers(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be a positive integer; got {value!r}")


def check_positive_numbers(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, Real) or not value > 0:
            raise ValueError(f"{name} must be a positive number; got {value!r}")


def check_pass(pass_: str) -> None:
    names.check_choice("pass", pass_, names.PASSES)


def check_attention_pass(pass_: str) -> None:
    check_pass(pass_)
    names.check_choice("pass of attention alone", pass_, names.ATTENTION_PASSES)


def dtype_bytes(dtype: str) -> int:
    """Bytes per element.

    Raises:
        ValueError: the dtype is not in DTYPE_BYTES; the message lists what is.
    """
    names.check_choice("dtype", dtype, DTYPE_BYTES)
    return DTYPE_BYTES[dtype]
