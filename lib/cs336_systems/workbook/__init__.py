"""Notebooks as files: what a notebook starts from (`Page`), the map of all of them, and running them."""

from cs336_systems.lazy_exports import lazy_exports

__getattr__, __all__ = lazy_exports(
    __name__, {"page": "Page", "map": "map_table read_map show_headline show_row show_tables"}
)
