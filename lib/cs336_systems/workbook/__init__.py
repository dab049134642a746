"""Notebooks as files: what a notebook starts from (`Page`), the map of all of them, and running them."""

from importlib import import_module
from typing import Any

# Imported on first use: a page needs matplotlib, and the command line should not wait for it.
_OFFERED = {
    "Page": "page",
    "map_table": "map",
    "read_map": "map",
    "show_headline": "map",
    "show_row": "map",
    "show_tables": "map",
}
__all__ = list(_OFFERED)


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)
