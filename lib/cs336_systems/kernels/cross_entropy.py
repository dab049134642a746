"""Cross-entropy of a matrix of logits in Triton, their gradient written over them.

    m[i] = max_j z[i, j]     s[i] = sum_j exp(z[i, j] - m[i])     loss[i] = log s[i] + m[i] - z[i, target[i]]
    dz[i, j] = exp(z[i, j] - m[i]) / s[i] - (1 where j is target[i])

One pass over a row finds its maximum and its sum, which is rescaled whenever the maximum grows (the online
softmax of Milakov and Gimelshein 2018); a second pass turns the row into its gradient. So logits are read
twice and written once, and there is never a second matrix of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.runtime import kernel_function, launch_kernel, row_tiles
from cs336_systems.kernels.tensors import check_tensors

# Logits that a program has in registers at a time.
TILE = 8192
# The first maximum: -inf - -inf would be NaN.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
IGNORED = tl.constexpr(-100)  # the target that does not count, as in PyTorch


@triton.jit
def load_tile(logits_ptr, rows, first, stride, n_rows, vocabulary, COLUMNS: tl.constexpr):
    """(columns, logits, their places, which exist) of the tile that begins with column `first`."""
    columns = first + tl.arange(0, COLUMNS)[None, :]
    inside = (rows[:, None] < n_rows) & (columns < vocabulary)
    place = logits_ptr + rows[:, None] * stride + columns
    z = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    return columns, z, place, inside


@triton.jit
def cross_entropy_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    stride,
    n_rows,
    vocabulary,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """loss (n_rows,) and the gradient in place of logits (n_rows, vocabulary). Grid: (row tiles,)."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    target = tl.load(target_ptr + rows, mask=rows < n_rows, other=IGNORED)
    counts = target != IGNORED
    known = (target >= 0) & (target < vocabulary) & (rows < n_rows)
    # NaN for a target that is not in the vocabulary: a look at it would make the host wait.
    target_logit = tl.load(logits_ptr + rows * stride + target, mask=known, other=float("nan"))
    target_logit = target_logit.to(tl.float32)
    maximum = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, vocabulary, COLUMNS):
        _, z, _, _ = load_tile(logits_ptr, rows, first, stride, n_rows, vocabulary, COLUMNS)
        larger = tl.maximum(maximum, tl.max(z, 1))
        total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(z - larger[:, None]), 1)
        maximum = larger
    # Rows that are not there have a sum of 0, and would be divided by it.
    total = tl.where(rows < n_rows, total, 1.0)
    # Never by the logsumexp, log s + m: as large as the logits, it would be rounded as coarsely, and every
    # probability with it.
    loss = tl.log(total) + (maximum - target_logit)
    tl.store(loss_ptr + rows, tl.where(counts, loss, 0.0), mask=rows < n_rows)
    # Every warp has to have read the logits of its targets before any is overwritten.
    tl.debug_barrier()
    for first in tl.range(0, vocabulary, COLUMNS):
        columns, z, place, inside = load_tile(
            logits_ptr, rows, first, stride, n_rows, vocabulary, COLUMNS
        )
        p = tl.exp(z - maximum[:, None]) / total[:, None]
        dz = p - tl.where(columns == target[:, None], 1.0, 0.0)
        dz = tl.where(counts[:, None], dz, 0.0)
        tl.store(place, dz, mask=inside)


def cross_entropy_(logits: Tensor, targets: Tensor) -> Tensor:
    """Losses (n,) in float32, and in place of the logits the gradient of the sum of the losses.

    Args:
        logits: (n, vocabulary) of float32, bfloat16 or float16, contiguous rows; overwritten.
        targets: (n,) int64. Of -100 the loss and the gradient are 0; of another number that is not in
            [0, vocabulary) the loss is NaN, because a look at them would make the host wait for the GPU.

    Raises:
        TypeError: another dtype. ValueError: shapes or strides that do not fit, an empty vocabulary, devices.
        RuntimeError: autograd would have to differentiate the overwriting.
    """
    if targets.dtype != torch.int64 or targets.device != logits.device:
        raise TypeError(
            f"targets are {targets.dtype} on {targets.device}; allowed: int64 on {logits.device}"
        )
    fits = logits.dim() == 2 and targets.shape == logits.shape[:1] and logits.shape[1] >= 1
    allowed = f"(n, vocabulary), each row contiguous, with targets (n,), not {tuple(targets.shape)}"
    check_tensors("logits", logits, fits=fits and logits.stride(1) == 1, allowed=allowed)
    if torch.is_grad_enabled() and logits.requires_grad:
        raise RuntimeError(
            "logits require grad and are overwritten; allowed: detached, or in torch.no_grad()"
        )
    return _overwrite(logits, targets)


# A decorator that is passed an argument: _overwrite = kernel_function(_overwrite, mutates="logits").
@lambda function: kernel_function(function, mutates="logits")
def _overwrite(logits: Tensor, targets: Tensor) -> Tensor:
    n_rows, vocabulary = logits.shape
    losses = logits.new_empty(n_rows, dtype=torch.float32)
    tiles, options = row_tiles(n_rows, vocabulary, TILE, TILE, 16)
    tensors = (logits, targets.contiguous(), losses)
    sizes = (logits.stride(0), n_rows, vocabulary)
    launch_kernel(cross_entropy_kernel, (tiles,), *tensors, *sizes, **options)
    return losses
