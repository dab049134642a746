"""Whole tensors dealt to the ranks, and buckets in which each rank's lie side by side.

A bucket is a flat buffer with a segment for each rank, all of one length:

    | rank 0: a, d | rank 1: b, c, padding |

So an all-gather in place gives everybody what each rank has updated in its segment, and a reduce-scatter in
place leaves each rank the sums of its own, and neither copies anything.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cs336_systems.parallel.overlapped import padded_length

# What a bucket holds: for each rank the tensors in its segment, in their order.
Segments = list[list[Tensor]]


def deal_tensors(tensors: Iterable[Tensor], world_size: int, bucket_size_mb: float) -> list[Segments]:
    """Deal tensors to the ranks so that in every bucket all have about as many bytes.

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


def segment_bytes(segments: Segments) -> int:
    """The length of each segment, padding included."""
    return (
        max(sum(padded_length(tensor) for tensor in segment) for segment in segments)
        * dtype_of(segments).itemsize
    )


def shard_bytes(buckets: Sequence[Segments]) -> list[int]:
    """By rank, the bytes of the tensors that it was dealt."""
    return [
        sum(tensor.nbytes for segments in buckets for tensor in segments[rank])
        for rank in range(len(buckets[0]))
    ]


class ShardedBucket:
    """The memory of one bucket.

    Attributes:
        whole: the flat buffer, all segments and their padding.
        segments: of each rank, its part of `whole`.
        views: of each tensor its place, with the tensor's shape and, if it is dense, its strides.
    """

    def __init__(self, segments: Segments):
        device = next(tensor.device for segment in segments for tensor in segment)
        dtype = dtype_of(segments)
        length = segment_bytes(segments) // dtype.itemsize
        self.whole = torch.zeros(len(segments) * length, dtype=dtype, device=device)
        self.segments = self.whole.split(length)
        self.views: dict[Tensor, Tensor] = {}
        for tensors, place in zip(segments, self.segments, strict=True):
            start = 0
            for tensor in tensors:
                strides = torch.empty_like(tensor, device="meta").stride()
                view = place[start : start + tensor.numel()]
                self.views[tensor] = view.as_strided(tensor.shape, strides)
                start += padded_length(tensor)
