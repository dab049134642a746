"""The worker of the tests of the checkers: what is said about each class."""

from cs336_systems.checks.on_ranks import run_cases


def check_each(context, classes, cases):
    return {name: run_cases(context, pickled, cases) for name, pickled in classes.items()}
