"""What a run of a notebook depends on: what it measures with, not how its results are shown.

That is its code up to "## Results", its parameters, the version of torch, and the code of the modules that
its imports reach. A change of a colour, a plot or a sentence measures nothing again.
"""

import ast
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from symtable import symtable
from typing import Any

from nbformat import NotebookNode

from cs336_systems import names

PACKAGE = Path(names.__file__).parent
_NAME = "cs336_systems"
_DOTTED = re.compile(rf"{_NAME}(\.\w+)+(:\w+)?")
# They show and keep what was measured; a change there changes no measurement.
_KEPT_BY = tuple(f"measure/{name}" for name in ("files", "rows", "schema", "validation"))
_OTHER = ("__main__", "names", "report/", "workbook/", *_KEPT_BY)


def fingerprint(notebook: NotebookNode, parameters: Mapping[str, Any]) -> str:
    """A digest that changes when the notebook, run with these parameters, may measure something else."""
    measuring = takewhile(lambda cell: "\n## Results" not in f"\n{cell.source}", notebook.cells)
    code = _parsed("\n".join(cell.source for cell in measuring if cell.cell_type == "code"))
    paths = reached(code)
    # What is imported for plots changes nothing; what is used is in the rest of the code.
    code.body = [node for node in code.body if not imported(node)]
    parts = [json.dumps(parameters, sort_keys=True), importlib.metadata.version("torch"), ast.dump(code)]
    parts += [f"{path.name} {ast.dump(_parsed(path.read_text()))}" for path in sorted(paths)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _parsed(source: str) -> ast.Module:
    """The code without its comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return tree


def reached(code: ast.Module) -> set[Path]:
    """The library's modules that the imports of some code reach, directly or through each other.

    Of `from cs336_systems.bench import sweep_attention`, or `bench.sweep_attention`, only the module that
    defines it counts.
    """
    found, waiting = {PACKAGE / "__init__.py"}, [code]
    while waiting:
        paths = {path for target in _targets(waiting.pop()) for path in _files(target)} - found
        paths = {path for path in paths if not path.relative_to(PACKAGE).as_posix().startswith(_OTHER)}
        found |= paths
        waiting += [_parsed(path.read_text()) for path in paths]
    return found


def imported(node: ast.AST) -> list[str]:
    """What an import statement names in the library: "cs336_systems.bench.sweep_attention"."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _NAME:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith(f"{_NAME}.")]
    return []


def _targets(tree: ast.Module) -> Iterator[str]:
    """Everything of the library that some code names: in imports, as text, or through the registry."""
    targets = [target for node in ast.walk(tree) for target in imported(node)]
    rooms = {target.rpartition(".")[2]: target for target in targets if _folder(target).is_dir()}
    yield from (target for target in targets if target not in rooms.values())
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(room), name) if room in rooms:
                yield f"{rooms[room]}.{name}"
            case ast.Constant(str(text)) if _DOTTED.fullmatch(text):
                yield text.replace(":", ".")
            case ast.Attribute(attr=name) | ast.Name(name) if isinstance(getattr(names, name, None), dict):
                for entry in getattr(names, name).values():
                    if function := getattr(entry, "function", ""):
                        yield function.replace(":", ".")


def _folder(target: str) -> Path:
    return PACKAGE.joinpath(*target.split(".")[1:])


def _files(target: str) -> list[Path]:
    """The module that a dotted name is, or those of its room that define it; all of the room if none does."""
    place, name = _folder(target), ""
    while not place.is_dir():
        if place.with_suffix(".py").is_file():
            return [place.with_suffix(".py")]
        place, name = place.parent, place.name
    modules = sorted(place.glob("*.py"))
    return [path for path in modules if name in _defined(path)] or modules


@cache
def _defined(path: Path) -> set[str]:
    """Names of the functions, classes and constants of a module."""
    symbols = symtable(path.read_text(), path.name, "exec").get_symbols()
    return {each.get_name() for each in symbols if each.is_assigned() and not each.is_imported()}
