"""What our functions ask of their tensors; without Triton."""

import torch
from torch import Tensor

from cs336_systems.dtypes import KERNEL_DTYPES


def check_tensors(
    names: str, *tensors: Tensor, fits: bool, allowed: str, same_dtype: bool = False
) -> None:
    """Refuse tensors, called by these names, unless their shapes fit; `allowed` describes shapes that do.

    Raises:
        TypeError: a dtype that is not one of KERNEL_DTYPES, or not the others'.
        ValueError: shapes that do not fit, devices that differ, layouts that are not strided.
    """
    dtypes = {x.dtype for x in tensors}
    if not dtypes.issubset(KERNEL_DTYPES) or (same_dtype and len(dtypes) > 1):
        one_of = ("all the same, one of " if same_dtype else "") + ", ".join(
            map(str, KERNEL_DTYPES)
        )
        raise TypeError(f"{names} have dtypes {_listed(tensors, 'dtype')}; allowed: {one_of}")
    if any(x.layout != torch.strided for x in tensors):
        raise ValueError(
            f"{names} have layouts {_listed(tensors, 'layout')}; allowed: torch.strided"
        )
    if any(x.device != tensors[0].device for x in tensors):
        raise ValueError(f"{names} are on {_listed(tensors, 'device')}; allowed: the same one")
    if not fits:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"{names} have shapes {shapes}; allowed: {allowed}")


def _listed(tensors: tuple[Tensor, ...], what: str) -> str:
    return ", ".join(str(getattr(x, what)) for x in tensors)


def as_rows(x: Tensor) -> Tensor:
    """x (..., d), d not 0, as (n, d) whose rows are contiguous, if not the whole; copied where it must be."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
