"""What the fused kernels ask of their tensors, and how they see them."""

import torch
from torch import Tensor

from cs336_systems.attention.inputs import DTYPES
from cs336_systems.kernels.runtime import INTERPRETED, check_device


def check_kernel_inputs(names: str, *tensors: Tensor) -> None:
    """Refuse tensors, called by these names, that are not on one device where kernels run, of DTYPES each.

    Raises:
        TypeError: a dtype that is not supported. ValueError: other devices. RuntimeError: as `check_device`.
    """
    if any(x.dtype not in DTYPES for x in tensors):
        given = ", ".join(str(x.dtype) for x in tensors)
        raise TypeError(f"{names} have dtypes {given}; allowed: {', '.join(map(str, DTYPES))}")
    if any(x.device != tensors[0].device for x in tensors):
        given = ", ".join(str(x.device) for x in tensors)
        raise ValueError(f"{names} are on devices {given}; allowed: the same one")
    check_device(names, tensors[0])


def as_rows(x: Tensor) -> Tensor:
    """x (..., d), d not 0, as (n, d) whose rows are contiguous, if not the whole; copied where it must be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a kernel's output is made in, before it is cast to this dtype, which mostly it is already.

    Cutting float32 down to bfloat16 the interpreter truncates where a GPU rounds; PyTorch rounds.
    """
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype
