"""What our own attention functions accept, said in one place."""

from collections.abc import Callable

import torch
from torch import Tensor

from cs336_systems.dtypes import KERNEL_DTYPES
from cs336_systems.kernels import tensors

AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
MAX_HEAD_SIZE = 256


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise a TypeError for anything but three tensors. Of what kind, `check_inputs` asks."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        kinds = ", ".join(type(x).__name__ for x in (q, k, v))
        raise TypeError(f"q, k, v are {kinds}; allowed: three tensors")


def in_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v; inside torch.autocast in the region's dtype, as attention is made of matmuls."""
    check_tensors(q, k, v)
    # The most frequent case, asked for in the fastest way.
    if q.is_cuda and not torch.is_autocast_enabled():
        return q, k, v
    # Autocast does not know the meta device; `check_inputs` refuses it, or devices that differ.
    if q.is_meta or k.is_meta or v.is_meta:
        check_inputs(q, k, v)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        # Even in a Function's forward: first_order_only has to find the inputs.
        with torch.enable_grad():
            q, k, v = (x.to(dtype) if x.dtype in KERNEL_DTYPES else x for x in (q, k, v))
    return q, k, v


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Validate q (..., n_queries, d) and k, v (..., n_keys, d), with two to four dimensions.

    Raises:
        TypeError: dtypes that differ or are not supported.
        ValueError: devices or shapes that do not fit, the meta device, a size of 0, or a head size over 256.
    """
    fits = 2 <= q.dim() == k.dim() <= 4 and k.shape == v.shape
    # Only from here on is it known that there are these dimensions.
    fits = fits and q.shape[:-2] == k.shape[:-2]
    fits = fits and q.shape[-1] == k.shape[-1] <= MAX_HEAD_SIZE
    fits = fits and q.numel() > 0 and k.numel() > 0
    allowed = (
        "(..., n_queries, d), (..., n_keys, d) and again (..., n_keys, d), at most four dimensions, none of "
        f"size 0, a head size d of at most {MAX_HEAD_SIZE}"
    )
    tensors.check_tensors("q, k, v", q, k, v, fits=fits, allowed=allowed, same_dtype=True)
    if q.is_meta:
        raise ValueError(
            "q, k, v are on meta; allowed: a device that is not meta, which has no numbers"
        )
