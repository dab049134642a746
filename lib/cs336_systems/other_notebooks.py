"""What a notebook takes from another one."""

import ast
import linecache
from functools import cache
from pathlib import Path
from typing import Any

import nbformat

_NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_DEFINING = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


def _defines(statement: ast.stmt) -> bool:
    """Whether it imports, defines, or gives a name to what a dotted name stands for."""
    what = getattr(statement, "value", statement)
    calls = any(isinstance(each, ast.Call) for each in ast.walk(what))
    return isinstance(what, _DEFINING) or (isinstance(what, ast.Attribute) and not calls)


@cache
def taken_from(notebook: str, name: str) -> Any:
    """A function, kernel or class that another notebook of this folder defines: what you have written there.

    Executed are its imports, its definitions and its names for modules; nothing that runs.
    """
    path, made = Path(f"{notebook}.ipynb"), {"__name__": notebook}
    for cell in nbformat.read(path if path.exists() else _NOTEBOOKS / path, as_version=4).cells:
        source, file = cell.source if cell.cell_type == "code" else "", f"<{notebook} {cell.id}>"
        tree = ast.parse(source)
        tree.body = list(filter(_defines, tree.body))
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        exec(compile(tree, file, "exec"), made)
    return made[name]
