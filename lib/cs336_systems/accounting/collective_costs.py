"""What communication must cost: the collectives, and the line that is fitted to their times.

A message is the largest buffer that a collective touches on a rank, as in NVIDIA's nccl-tests: the tensor of
an all-reduce or a broadcast, the gathered output of an all-gather, the input of a reduce-scatter or an
all-to-all. Sizes in MB count 2**20 bytes, like PyTorch's buckets; GB/s count 10**9, like data sheets.

During backward, buckets queue for one link: each takes a latency and its bytes over the bandwidth (o and w of
the handout). What is still in flight when backward ends is exposed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cs336_systems.arguments import check_choice

MB = 2**20
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def bus_factor(collective: str, world_size: int) -> float:
    """Bytes that cross each link for each byte of the message, at best (nccl-tests, PERFORMANCE.md).

    In an all-reduce each of the n parts crosses n - 1 links to be summed, and again to be spread.
    """
    check_choice("collective", collective, COLLECTIVES)
    return 1.0 if collective == "broadcast" else rank_bytes(collective, 1, world_size)


def rank_bytes(collective: str, size: float, world_size: int) -> float:
    """Bytes that a rank sends when so many go through a collective: the mean over the ranks, around a ring.

    Every part passes W - 1 links, to be summed or to be spread; in an all-reduce both.
    """
    passes = 2 if collective == "all_reduce" else 1
    return passes * size * (world_size - 1) / world_size


@dataclass(frozen=True)
class AlphaBeta:
    """seconds = latency_s + message_bytes * seconds_per_byte, fitted to measured times.

    `residuals` are (predicted - measured) / measured, in the order of the measurements.
    """

    latency_s: float
    seconds_per_byte: float
    residuals: tuple[float, ...]

    @property
    def bandwidth_gbps(self) -> float:
        """Algorithm bandwidth of an endless message."""
        return 1e-9 / self.seconds_per_byte if self.seconds_per_byte else math.inf

    @property
    def half_bandwidth_bytes(self) -> float:
        """The message that takes as long to start as to send, and so gets half the bandwidth."""
        return self.latency_s * self.bandwidth_gbps * 1e9

    def seconds(self, message_bytes: float) -> float:
        return self.latency_s + message_bytes * self.seconds_per_byte


def fit_alpha_beta(message_bytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Fit latency and bandwidth, neither below zero, by least squares of the *relative* errors.

    With absolute errors the largest message alone would decide.
    """
    sizes = np.asarray(message_bytes, float)
    times = np.asarray(seconds, float)
    if len(set(sizes)) < 2 or not (times > 0).all():
        raise ValueError(
            f"{sizes} and {times} cannot be fitted; allowed: two sizes or more, times above 0"
        )
    # (alpha + beta size) / time = 1, with sizes of at most 1.
    largest = sizes.max()
    columns = np.stack([1 / times, sizes / largest / times], axis=1)
    line = np.linalg.lstsq(columns, np.ones(len(times)))[0]
    # If one is below zero, the best fit lies on the border: with that one at zero, a line of the other alone.
    if line.min() < 0:
        other = line.argmax()
        column = columns[:, other]
        line = np.zeros(2)
        line[other] = column.sum() / np.square(column).sum()
    residuals = columns @ line - 1
    alpha, beta = line.tolist()
    return AlphaBeta(alpha, beta / float(largest), tuple(residuals.tolist()))


def fit_collective(
    rows, collective: str = "all_reduce", world_size: int = 2, backend: str = "nccl"
) -> AlphaBeta:
    """The fit of the median times of one collective, in a frame with rows of collective_times."""
    measured = rows.query(
        "collective == @collective and world_size == @world_size"
        " and backend == @backend and status == 'ok'"
    ).sort_values("message_mb")
    return fit_alpha_beta(measured["message_mb"] * MB, measured["p50_ms"] / 1e3)


def reference_link(page, collective: str = "all_reduce", world_size: int = 2) -> AlphaBeta:
    """The fit of a collective over NCCL, by notebook 31's rows of the page's reference."""
    rows = page.reference_rows("collective_times", "distributed_communication_single_node")
    return fit_collective(rows, collective, world_size)
