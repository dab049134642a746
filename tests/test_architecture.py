"""Rooms of the two packages: what may import what."""

import ast
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
    return {"__main__": "command line"}.get(first) or (first if first in ARROWS else "base")


def module_of(target: str) -> str:
    """The module that an imported name is in: itself, or the `__init__` of its room."""
    while target and target not in MODULES and f"{target}.__init__" not in MODULES:
        target = target.rpartition(".")[0]
    return target if target in MODULES else f"{target}.__init__"


def imports(module: str, *, while_importing: bool = False) -> set[str]:
    """The modules that a module imports, anywhere or only while it is itself imported."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    if while_importing:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [ast.Pass()]
    return {module_of(target) for node in ast.walk(tree) for target in imported(node, PACKAGES)}


def test_rooms_import_from_the_rooms_below_them():
    arrows = {
        (module, room(module), room(other)) for module in MODULES for other in imports(module)
    }
    wrong = [arrow for arrow in arrows if arrow[2] not in [arrow[1]] + ARROWS[arrow[1]].split()]
    assert sorted(wrong) == []


def test_no_module_needs_itself_to_be_imported():
    tops = {f"{package}.__init__" for package in PACKAGES}
    needs = {module: imports(module, while_importing=True) - tops - {module} for module in MODULES}
    done: set[str] = set(tops)
    while len(done) < len(needs):
        ready = {module for module in needs if module not in done and needs[module] <= done}
        assert ready, f"a circle among {sorted(set(needs) - done)}"
        done |= ready
