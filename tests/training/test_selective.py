"""The knapsack of selective checkpointing: as good as trying every subset, and never over the budget."""

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.training.selective import MIB, Item, choose

ITEMS = st.lists(
    st.builds(
        Item, st.text(max_size=3), st.integers(0, 12 * MIB), st.floats(-1, 5).map(lambda x: round(x, 2))
    ),
    max_size=7,
)


def mib(items):
    return sum(-(-item.kept_bytes // MIB) for item in items)


@given(ITEMS, st.integers(0, 40 * MIB))
def test_as_good_as_trying_every_subset(items, budget):
    chosen = choose(items, budget)
    assert mib(chosen) <= budget // MIB
    subsets = chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))
    best = max(sum(x.saved_ms for x in subset) for subset in subsets if mib(subset) <= budget // MIB)
    assert sum(x.saved_ms for x in chosen) == pytest.approx(best)


def test_the_best_ratio_first_would_be_wrong():
    kinds = {"small": (3, 4.0), "large": (5, 5.0), "other": (5, 5.0)}
    small, large, other = (Item(name, n * MIB, ms) for name, (n, ms) in kinds.items())
    assert choose([small, large, other], 10 * MIB) == [large, other]
    assert choose([small, large, other], 9 * MIB) == [small, large]
