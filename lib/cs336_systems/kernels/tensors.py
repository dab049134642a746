"""What our functions ask of their tensors; without Triton."""

from collections.abc import Iterable

from torch import Tensor

from cs336_systems.dtypes import KERNEL_DTYPES


def check_tensors(
    names: str, *tensors: Tensor, fits: bool, allowed: str, same_dtype: bool = False
) -> None:
    """Refuse tensors, called by these names, unless their shapes fit; `allowed` describes shapes that do.

    Raises:
        TypeError: a dtype that is not one of KERNEL_DTYPES, or not the others'.
        ValueError: shapes that do not fit, devices that differ.
    """
    dtypes = [x.dtype for x in tensors]
    devices = [x.device for x in tensors]
    if not set(dtypes).issubset(KERNEL_DTYPES) or (same_dtype and len(set(dtypes)) > 1):
        same = "all the same, " if same_dtype else ""
        one_of = f"{same}one of {_listed(KERNEL_DTYPES)}"
        raise TypeError(f"{names} have dtypes {_listed(dtypes)}; allowed: {one_of}")
    if len(set(devices)) > 1:
        raise ValueError(f"{names} are on {_listed(devices)}; allowed: the same one")
    if not fits:
        shapes = [tuple(x.shape) for x in tensors]
        raise ValueError(f"{names} have shapes {_listed(shapes)}; allowed: {allowed}")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def as_rows(x: Tensor) -> Tensor:
    """x (..., d), d not 0, as (n, d) whose rows are contiguous, if not the whole; copied where it must be."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
