"""Selective activation checkpointing: what to keep from forward to backward, solved as a knapsack."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIB = 2**20


class Item(NamedTuple):
    """Something that forward can keep, or backward make again: one tensor of one layer, say.

    What it saves must not depend on what else is kept: then times add up.
    """

    name: str
    kept_bytes: int
    saved_ms: float  # of recomputation, if it is kept


def choose(items: Sequence[Item], budget_bytes: int) -> list[Item]:
    """The items that save the most recomputation and fit into the budget together, in their order.

    Exact, by dynamic programming over the budget in MiB, an item's bytes rounded up: best[m] after each item
    is the most time that the items so far can save in m MiB. Work: items times MiB.
    """
    budget = budget_bytes // MIB
    sizes = [math.ceil(item.kept_bytes / MIB) for item in items]
    best = np.zeros(budget + 1)
    taken = np.zeros((len(items), budget + 1), dtype=bool)
    for number, (item, size) in enumerate(zip(items, sizes, strict=True)):
        if size > budget:
            continue
        with_it = best[: budget + 1 - size] + item.saved_ms
        taken[number, size:] = with_it > best[size:]
        best[size:] = np.maximum(with_it, best[size:])
    chosen = []
    for number in reversed(range(len(items))):
        if taken[number, budget]:
            chosen.append(items[number])
            budget -= sizes[number]
    return chosen[::-1]
