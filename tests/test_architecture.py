"""Rooms of the two packages: what may import what."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from library_imports import PACKAGES, imported

REPOSITORY = Path(__file__).parents[1]
LIB = REPOSITORY / "lib"
# From which rooms a room may import, besides itself. "base": configs, dtypes and other files of the top.
ARROWS = {
    "base": "",
    "kernels": "base",
    "attention": "base kernels accounting",
    "model": "base attention",
    "accounting": "base",
    "training": "base kernels attention model accounting",
    "parallel": "base model training",
    "traffic": "base model parallel",
    "checks": "base kernels attention model training parallel traffic",
    "labbook": "",
    "command line": "base labbook",
}
MODULES = {
    ".".join(path.relative_to(LIB).with_suffix("").parts): path
    for package in PACKAGES
    for path in (LIB / package).rglob("*.py")
}


def room(name: str) -> str:
    """ "cs336_systems.parallel.steps" -> "parallel"."""
    package, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    if package == "labbook":
        return "labbook"
    if first == "__main__":
        return "command line"
    return first if first in ARROWS else "base"


def module_of(target: str) -> str:
    """The module that an imported name is in: itself, or the `__init__` of its room."""
    while target and target not in MODULES and f"{target}.__init__" not in MODULES:
        target = target.rpartition(".")[0]
    return target if target in MODULES else f"{target}.__init__"


def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def without_functions(tree: ast.Module) -> ast.Module:
    """What is executed while a module is imported; the tree is changed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    return tree


def imports(tree: ast.Module) -> set[str]:
    """The modules of the library that a module imports."""
    return {module_of(target) for node in ast.walk(tree) for target in imported(node, PACKAGES)}


def test_rooms_import_from_the_rooms_below_them():
    wrong = []
    for module in MODULES:
        own = room(module)
        allowed = [own] + ARROWS[own].split()
        wrong += [
            (module, other) for other in imports(parsed(module)) if room(other) not in allowed
        ]
    assert wrong == []


def test_no_module_needs_itself_to_be_imported():
    tops = {f"{package}.__init__" for package in PACKAGES}
    needs = {module: imports(without_functions(parsed(module))) for module in MODULES}
    graph = {module: needed - tops - {module} for module, needed in needs.items()}
    TopologicalSorter(graph).prepare()  # refuses a circle, and names it
