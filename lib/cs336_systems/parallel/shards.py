"""Partition whole tensors over the ranks; buckets store each rank's tensors contiguously.

A bucket is a flat buffer with a segment for each rank, all of one length:

    | rank 0: a, d | rank 1: b, c, padding |

So an all-gather in place gives everybody what each rank has updated in its segment, without a copy.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Of each tensor in its buffer: vectorised kernels are slow at unaligned addresses.
ALIGNMENT_BYTES = 128

# What a bucket holds: for each rank the tensors in its segment, in their order.
Segments = list[list[Tensor]]


def padded_length(tensor: Tensor) -> int:
    """Elements that a tensor takes in a flat buffer; an empty one takes some too, as no buffer may be."""
    step = ALIGNMENT_BYTES // tensor.element_size()
    return max(1, -(-tensor.numel() // step)) * step


def fill_buckets(
    tensors: Sequence[Tensor], order: Sequence[int], bucket_bytes: float
) -> list[list[int]]:
    """Fill buckets with tensors in this order; a bucket holds one dtype and device.

    Args:
        tensors: parameters or gradients; only their sizes matter, so they may be on the meta device.
        order: indices in `tensors`, in the order in which they become ready.
        bucket_bytes: the most a bucket holds, padding apart; a larger tensor is a bucket of its own.

    Returns:
        Each bucket's indices in that order; the buckets in the order in which they become complete.
    """
    buckets: list[list[int]] = []
    # Of a dtype and device the newest bucket and its bytes.
    newest: dict[tuple, tuple[list[int], int]] = {}
    for index in order:
        tensor = tensors[index]
        kind = (tensor.dtype, tensor.device)
        bucket, filled = newest.get(kind, ([], 0))
        if not bucket or filled + tensor.nbytes > bucket_bytes:
            bucket = []
            filled = 0
            buckets.append(bucket)
        bucket.append(index)
        newest[kind] = (bucket, filled + tensor.nbytes)
    position = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def partition_tensors(
    tensors: Iterable[Tensor], world_size: int, bucket_size_mb: float
) -> list[Segments]:
    """Partition tensors over the ranks so that in every bucket all have about as many bytes.

    From the largest to the smallest, each joins the shortest segment of the first bucket of its dtype where
    that stays within the longest. Else the newest bucket grows, up to the limit, or a new one begins.

    Two ranks, a, b, c, d of 4, 2, 2, 1 KiB: | a, d | b, c |; with a limit of 1 KiB | a | b, c | and | d | |.

    Args:
        tensors: parameters; only their sizes and dtypes matter, so they may be on the meta device.
        bucket_size_mb: the most a bucket holds, all segments together, in MB of 2**20 bytes. A larger tensor
            begins a bucket, and the gaps beside it are filled with others.
    """
    # Buckets, each with the lengths of its segments in elements.
    of_dtype: dict[torch.dtype, list[tuple[Segments, list[int]]]] = defaultdict(list)
    for tensor in sorted(tensors, key=lambda tensor: -tensor.nbytes):
        length = padded_length(tensor)
        limit = bucket_size_mb * 2**20 / tensor.element_size() / world_size
        buckets = of_dtype[tensor.dtype]
        # Both ends leave segments, lengths and rank bound: `break` those of the first bucket with room, where
        # rank is its shortest segment; `else`, where none has room, those of a new one.
        for bucket in buckets:
            segments, lengths = bucket
            rank = lengths.index(min(lengths))
            may_grow_to = limit if bucket is buckets[-1] else 0
            if lengths[rank] + length <= max(may_grow_to, *lengths):
                break
        else:
            rank = 0
            segments = [[] for _ in range(world_size)]
            lengths = [0] * world_size
            buckets.append((segments, lengths))
        segments[rank].append(tensor)
        lengths[rank] += length
    return [segments for buckets in of_dtype.values() for segments, _ in buckets]


def _first(segments: Segments) -> Tensor:
    return next(tensor for segment in segments for tensor in segment)


def segment_bytes(segments: Segments) -> int:
    """The size of each segment, padding included."""
    return max(sum(map(padded_length, part)) for part in segments) * _first(segments).element_size()


class BucketMemory:
    """The memory of one bucket."""

    def __init__(self, segments: Segments, whole: Tensor):
        # The flat buffer, all segments and their padding.
        self.whole = whole
        # By rank.
        self.segments = whole.chunk(len(segments))
        # Slices, in a tensor's shape and, if it is dense, strides.
        self.views: dict[Tensor, Tensor] = {}
        for tensors, slice_ in zip(segments, self.segments, strict=True):
            start = 0
            for tensor in tensors:
                strides = torch.empty_like(tensor, device="meta").stride()
                view = slice_[start : start + tensor.numel()]
                self.views[tensor] = view.as_strided(tensor.shape, strides)
                start += padded_length(tensor)


def allocate(buckets: Sequence[Segments]) -> list[BucketMemory]:
    """Memory for buckets, side by side in one buffer."""
    sizes = [len(segments) * segment_bytes(segments) for segments in buckets]
    # As bytes, since buckets differ in dtype.
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=_first(buckets[0]).device)
    wholes = memory.split(sizes)
    return [
        BucketMemory(segments, whole.view(_first(segments).dtype))
        for segments, whole in zip(buckets, wholes, strict=True)
    ]
