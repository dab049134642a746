"""Checks of arguments that many functions take: a name from a list, a dimension."""

from collections.abc import Iterable
from numbers import Integral
from typing import Any


def check_choice(what: str, value: Any, allowed: Iterable[Any]) -> None:
    """Refuse a name that is not one of the allowed.

    Raises:
        ValueError: it is not; the message lists those that are.
    """
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{what} {value!r} is unknown; allowed: {', '.join(map(str, allowed))}")


def check_positive_integers(**values: int) -> None:
    """Refuse a dimension that is none, with a ValueError that names it."""
    for name, value in values.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be a positive integer; got {value!r}")
