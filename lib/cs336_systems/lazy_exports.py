"""The `__init__` of a subpackage: it lists the names to import from it, and imports each on its first use."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_exports(package: str, modules: dict[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` and the `__all__` of a package.

    Args:
        modules: the package's modules, each with its public names; its own name is the module itself.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def import_on_use(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{module_of[name]}")
        return module if name == module_of[name] else getattr(module, name)

    return import_on_use, [*module_of]
