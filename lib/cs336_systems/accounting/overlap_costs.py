"""What communication adds to a step when it runs during backward: a queue of buckets on one link.

A bucket is ready when backward has made its last gradient. Then it takes a latency and its bytes over the
bandwidth (o and w of the handout, those of `fit_alpha_beta`), after the buckets before it. What is
still on its way when backward ends is the overhead. PyTorch's DDP fills buckets by a rule of its own: its
messages are counted here too.
"""

import math
from collections.abc import Iterable, Sequence

from torch import Tensor


def exposed_seconds(
    bucket_bytes: Sequence[float], *, backward_s: float, latency_s: float, bytes_per_s: float
) -> float:
    """Time from the end of backward to the arrival of the last bucket.

    Backward makes gradients at a steady rate of bytes: matmuls take time in proportion to the parameters.
    The bytes of all buckets take `backward_s`.

    Args:
        bucket_bytes: sizes of the buckets in the order in which they become ready, one or more above zero.
    """
    total, made, free_at = sum(bucket_bytes), 0.0, 0.0
    for size in bucket_bytes:
        made += size
        free_at = max(free_at, backward_s * made / total) + latency_s + size / bytes_per_s
    return free_at - backward_s


def equal_buckets_exposed_seconds(
    total_bytes: float,
    buckets: float,
    *,
    latency_s: float,
    bytes_per_s: float,
    backward_s: float | None = None,
) -> float:
    """The same for equal buckets, in closed form; `buckets` need not be a whole number.

    A bucket takes m = o + s / (n w) to send and c = B / n to compute. The last is ready at B. If sending is
    the slower of the two, a backlog of m - c grows with every bucket: m + (n - 1) max(0, m - c).

    Args:
        backward_s: B; by default s / w, the handout's assumption that a bucket's gradients take as long to
            compute as its bytes to send. Then the overhead is n o + s / (n w).
    """
    backward_s = total_bytes / bytes_per_s if backward_s is None else backward_s
    message_s = latency_s + total_bytes / (buckets * bytes_per_s)
    return message_s + (buckets - 1) * max(0.0, message_s - backward_s / buckets)


def best_bucket_bytes(total_bytes: float, *, latency_s: float, bytes_per_s: float) -> float:
    """The bucket size with least overhead under the handout's assumption, sqrt(s w o).

    The overhead n o + s / (n w) is least where its two parts are equal: n = sqrt(s / (w o)), a bucket s / n.
    """
    return math.sqrt(total_bytes * bytes_per_s * latency_s)


def torch_bucket_bytes(parameters: Iterable[Tensor], bucket_size_mb: float) -> list[int]:
    """Sizes of the messages of PyTorch's DDP, the first one first, as `overlapped.bucket_bytes` of ours.

    PyTorch closes a bucket as soon as it holds bucket_size_mb or more. `BucketedDDP` closes one before it
    would hold more, so the same number makes more and smaller messages. (PyTorch's small first bucket of
    1 MB comes with its default size only, not with one that is asked for.)
    """
    limit = int(bucket_size_mb * 2**20)
    buckets: list[int] = []
    for parameter in reversed(list(parameters)):
        if not buckets or buckets[-1] >= limit:
            buckets.append(0)
        buckets[-1] += parameter.nbytes
    return buckets
