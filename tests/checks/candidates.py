"""The worker of test_on_ranks.py."""

from cs336_systems.checks.on_ranks import try_properties


def try_each(context, pickled):
    return {name: " ".join(try_properties(context, each)) for name, each in pickled.items()}
