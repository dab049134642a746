"""Partition whole tensors over the ranks; buckets store each rank's tensors contiguously.

A bucket is a flat buffer with a segment for each rank, all of one length:

    | rank 0: a, d | rank 1: b, c, padding |

So an all-gather in place gives everybody what each rank has updated in its segment, and a reduce-scatter in
place leaves each rank the sums of its own, and neither copies anything.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ALIGNMENT_BYTES = 128  # of each tensor in its buffer: vectorised kernels are slow at unaligned addresses

# What a bucket holds: for each rank the tensors in its segment, in their order.
Segments = list[list[Tensor]]


def dtype_and_device(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """What the tensors of a bucket have in common."""
    return tensor.dtype, tensor.device


def padded_length(tensor: Tensor) -> int:
    """Elements that a tensor takes in a flat buffer; an empty one takes some too, as no buffer may be."""
    step = ALIGNMENT_BYTES // tensor.element_size()
    return max(1, -(-tensor.numel() // step)) * step


def partition_tensors(tensors: Iterable[Tensor], world_size: int, bucket_size_mb: float) -> list[Segments]:
    """Partition tensors over the ranks so that in every bucket all have about as many bytes.

    From the largest to the smallest, each goes into the tightest gap that it fits, between the end of a
    segment and that of the longest one of its bucket. Where there is none, the newest bucket of its dtype
    grows at its shortest segment, and where that would exceed the limit, a new bucket begins.

    Args:
        tensors: parameters; only their sizes and dtypes matter, so they may be on the meta device.
        bucket_size_mb: the most a bucket holds, all segments together, in MB of 2**20 bytes. A larger tensor
            begins a bucket, and the gaps beside it are filled with others.
    """
    buckets: list[Segments] = []
    used: list[list[int]] = []  # of each bucket, by rank, the length of its segment so far
    newest: dict[torch.dtype, int] = {}
    for tensor in sorted(tensors, key=lambda tensor: -tensor.nbytes):
        length, limit = padded_length(tensor), bucket_size_mb * 2**20 / tensor.element_size() / world_size
        gaps = (
            (max(used[number]) - taken - length, number, rank)
            for number, segments in enumerate(buckets)
            if dtype_of(segments) == tensor.dtype
            for rank, taken in enumerate(used[number])
        )
        _, number, rank = min((gap for gap in gaps if gap[0] >= 0), default=(0, None, 0))
        if number is None:
            number = newest.get(tensor.dtype)
            if number is None or min(used[number]) + length > limit:
                number = newest[tensor.dtype] = len(buckets)
                buckets.append([[] for _ in range(world_size)])
                used.append([0] * world_size)
            rank = used[number].index(min(used[number]))
        buckets[number][rank].append(tensor)
        used[number][rank] += length
    return buckets


def dtype_of(segments: Segments) -> torch.dtype:
    return next(tensor.dtype for segment in segments for tensor in segment)


def segment_length(segments: Segments) -> int:
    """Elements of each segment, padding included."""
    return max(sum(map(padded_length, segment)) for segment in segments)


def segment_bytes(segments: Segments) -> int:
    """The size of each segment, padding included."""
    return segment_length(segments) * dtype_of(segments).itemsize


def shard_bytes(buckets: Sequence[Segments]) -> list[int]:
    """By rank, the bytes of its tensors."""
    return [
        sum(tensor.nbytes for segments in buckets for tensor in segments[rank])
        for rank in range(len(buckets[0]))
    ]


class BucketMemory:
    """The memory of one bucket.

    Attributes:
        whole: the flat buffer, all segments and their padding.
        segments: of each rank, its part of `whole`.
        views: of each tensor its slice, with the tensor's shape and, if it is dense, its strides.
    """

    def __init__(self, segments: Segments, whole: Tensor):
        self.whole, self.segments = whole, whole.chunk(len(segments))
        self.views: dict[Tensor, Tensor] = {}
        for tensors, slice_ in zip(segments, self.segments, strict=True):
            start = 0
            for tensor in tensors:
                strides = torch.empty_like(tensor, device="meta").stride()
                view = slice_[start : start + tensor.numel()]
                self.views[tensor] = view.as_strided(tensor.shape, strides)
                start += padded_length(tensor)


def allocate(buckets: Sequence[Segments]) -> list[BucketMemory]:
    """Memory for buckets, side by side in one buffer for each dtype and device."""
    firsts = [next(tensor for segment in segments for tensor in segment) for segments in buckets]
    wholes: dict[int, Tensor] = {}
    for kind in dict.fromkeys(map(dtype_and_device, firsts)):
        numbers = [number for number, first in enumerate(firsts) if dtype_and_device(first) == kind]
        lengths = [len(buckets[number]) * segment_length(buckets[number]) for number in numbers]
        buffer = torch.zeros(sum(lengths), dtype=kind[0], device=kind[1])
        wholes |= zip(numbers, buffer.split(lengths), strict=True)
    return [BucketMemory(segments, wholes[number]) for number, segments in enumerate(buckets)]
