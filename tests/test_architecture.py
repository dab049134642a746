"""Rooms of the library: what may import what, what a room offers."""

import ast
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from library_imports import imported

import cs336_systems

PACKAGE = Path(cs336_systems.__file__).parent
NOTEBOOKS = sorted((PACKAGE.parents[1] / "notebooks").glob("*.ipynb"))
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
# A room imports from those before it, and from itself; all that is not listed is the core.
ORDER = ("core", "checks", "measure", "bench", "report", "workbook")
MODULES = {
    ".".join([PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]): path
    for path in PACKAGE.rglob("*.py")
}


def room(module: str) -> str:
    """ "cs336_systems.bench.flash_bench" -> "bench"; the command line belongs to the last room."""
    name = module.split(".")[1] if "." in module else ""
    return "workbook" if name == "__main__" else name if name in ORDER else "core"


def modules_of(target: str) -> list[str]:
    """The module that an imported name is in: itself, or the `__init__` of its room."""
    while target and target not in MODULES and f"{target}.__init__" not in MODULES:
        target = target.rpartition(".")[0]
    return [target if target in MODULES else f"{target}.__init__"]


def imports(module: str, *, while_importing: bool = False) -> set[str]:
    """The library's modules that a module imports, anywhere or only while it is itself imported."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    if while_importing:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [ast.Pass()]
    targets = [target for node in ast.walk(tree) for target in imported(node)]
    return {name for target in targets for name in modules_of(target)}


def test_arrows_go_one_way():
    pairs = [(module, other) for module in MODULES for other in imports(module)]
    assert [pair for pair in pairs if ORDER.index(room(pair[0])) < ORDER.index(room(pair[1]))] == []


def test_no_module_needs_itself_to_be_imported():
    needs = {
        module: imports(module, while_importing=True) - {module, f"{PACKAGE.name}.__init__"}
        for module in MODULES
    }
    done: set[str] = set()
    while len(done) < len(needs):
        ready = {module for module in needs if module not in done and needs[module] <= done}
        assert ready, f"a circle among {sorted(set(needs) - done)}"
        done |= ready


def test_a_file_name_means_one_file():
    stems = Counter(path.stem for path in MODULES.values())
    assert {stem for stem, count in stems.items() if count > 1} <= {"__init__", "__main__"}


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_offers_what_it_lists(name):
    module = import_module(f"{PACKAGE.name}.{name}")
    assert module.__doc__
    missing = [offered for offered in module.__all__ if not hasattr(module, offered)]
    assert missing == []
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_import_names_that_exist(path):
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for node in ast.walk(ast.parse("\n".join(code))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith(PACKAGE.name):
            if "triton" in node.module and find_spec("triton") is None:
                continue
            module = import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}"), ast.unparse(
                    node
                )
