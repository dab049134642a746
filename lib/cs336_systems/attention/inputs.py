"""What our own attention functions accept, said in one place."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise one clear sentence for tensors that are no (..., n, d) queries, keys and values of one kind.

    Raises:
        TypeError: dtypes that differ or are not supported.
        ValueError: devices or shapes that do not fit together, no rows at all, or a head size over 256.
    """
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise TypeError(
            f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; "
            f"allowed: all three the same, one of {', '.join(map(str, DTYPES))}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k, v are on devices {q.device}, {k.device}, {v.device}; allowed: all on the same one"
        )
    shapes = f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    fit = q.dim() >= 2 and k.shape == v.shape and q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not fit:
        raise ValueError(
            f"{shapes}; allowed: (..., n_queries, d), (..., n_keys, d) and again (..., n_keys, d)"
        )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"{shapes}; allowed: no dimension of size 0")
    if q.shape[-1] > MAX_HEAD_SIZE:
        raise ValueError(f"{shapes}; allowed: a head size d of at most {MAX_HEAD_SIZE}")


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Inside torch.autocast, attention runs in the region's dtype, like the matrix products it is made of."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)
