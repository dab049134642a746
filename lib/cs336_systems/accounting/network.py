"""A ring of devices, simulated round by round: when the last of them has its collective.

In a round each device sends over its own link to the next. A message starts when both ends have come to its
round; the sender goes on when its last byte has left, the receiver when that byte has also passed the hop. So
a slow link delays those who wait for it, and in the end all. A round is one numpy operation, and equal rounds
that took every device equally long are counted instead of repeated: 100,000 devices take seconds (not with a
slow link). Collectives run around rings (Patarasuk and Yuan 2009).
"""

import numpy as np

# How often each part of the message goes around.
_TURNS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def ring_seconds(
    collective: str,
    message_bytes: float,
    devices: int,
    bytes_per_s: float | np.ndarray,
    hop_s: float = 0.0,
) -> float:
    """Seconds until every device of a ring is done with a collective.

    Args:
        message_bytes: the largest buffer on a device.
        bytes_per_s: of each device's link, or of all; one smaller entry is a slow link.
        hop_s: latency of a message.
    """
    sending_s = message_bytes / devices / np.broadcast_to(bytes_per_s, devices)
    rounds = _TURNS[collective] * (devices - 1)
    clocks = np.zeros(devices)
    for rounds_left in reversed(range(rounds)):
        starts = np.maximum(clocks, np.roll(clocks, -1))
        departures = starts + sending_s
        arrivals = np.roll(departures + hop_s, 1)
        round_s = np.maximum(departures, arrivals) - clocks
        clocks = clocks + round_s
        # All devices took equally long: so will all rounds that follow.
        if (round_s == round_s[0]).all():
            clocks += rounds_left * round_s
            break
    return float(clocks.max())
