"""What the kernels ask of their tensors, and how they tile and see them."""

from typing import Any

import torch
import triton
from torch import Tensor

from cs336_systems.dtypes import KERNEL_DTYPES
from cs336_systems.kernels.runtime import INTERPRETED, check_device


def check_kernel_inputs(
    names: str, *tensors: Tensor, fits: bool, allowed: str, same_dtype: bool = False
) -> None:
    """Refuse tensors, called by these names, that no kernel takes; `allowed` describes the shapes that fit.

    Raises:
        TypeError: a dtype that is not one of KERNEL_DTYPES, or not the others'.
        ValueError: shapes that do not fit, devices that differ. RuntimeError: as `check_device`.
    """
    dtypes = {x.dtype for x in tensors}
    if not dtypes.issubset(KERNEL_DTYPES) or (same_dtype and len(dtypes) > 1):
        one_of = ("all the same, one of " if same_dtype else "") + ", ".join(map(str, KERNEL_DTYPES))
        raise TypeError(f"{names} have dtypes {_listed(x.dtype for x in tensors)}; allowed: {one_of}")
    if any(x.device != tensors[0].device for x in tensors):
        raise ValueError(
            f"{names} are on devices {_listed(x.device for x in tensors)}; allowed: the same one"
        )
    if not fits:
        raise ValueError(
            f"{names} have shapes {_listed(tuple(x.shape) for x in tensors)}; allowed: {allowed}"
        )
    check_device(names, tensors[0])


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))


def row_tile(n_rows: int, d: int, elements: int, widest: int, most_warps: int) -> dict[str, int]:
    """ROWS, COLUMNS, num_warps of a tile: whole rows up to `widest` columns, no more rows than there are."""
    columns = min(triton.next_power_of_2(d), widest)
    rows = max(1, min(elements // columns, triton.next_power_of_2(n_rows)))
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": min(max(rows * columns // 512, 4), most_warps)}


def as_rows(x: Tensor) -> Tensor:
    """x (..., d), d not 0, as (n, d) whose rows are contiguous, if not the whole; copied where it must be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a kernel's output before it is cast to `dtype`: nearly always that one.

    The interpreter truncates float32 to bfloat16 where a GPU rounds; PyTorch rounds.
    """
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype
