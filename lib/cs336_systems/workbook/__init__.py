"""Notebooks as files: what a notebook starts from (`Page`), the map of all of them, and running them."""

from cs336_systems.rooms import room

__getattr__, __all__ = room(
    __name__, {"page": "Page", "map": "map_table read_map show_headline show_row show_tables"}
)
