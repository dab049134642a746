"""The worker of the tests of the checkers, and what makes a candidate with a bug."""

from cs336_systems.checks.on_ranks import try_properties


def try_each(context, pickled):
    return {name: " ".join(try_properties(context, each)) for name, each in pickled.items()}


def bug(base, **methods):
    """The right class but for these methods."""
    return type(f"Wrong{base.__name__}", (base,), methods)
