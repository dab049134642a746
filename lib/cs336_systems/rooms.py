"""A room's `__init__`: it lists what the room offers, and imports each name on its first use."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def room(package: str, modules: dict[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` and the `__all__` of a package.

    Args:
        modules: the package's modules, each with the names that it offers; its own name is the module itself.
    """
    offered = {name: module for module, names in modules.items() for name in names.split()}

    def import_on_use(name: str) -> Any:
        if name not in offered:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{offered[name]}")
        return module if name == offered[name] else getattr(module, name)

    return import_on_use, [*offered]
