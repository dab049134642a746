"""What a run of a notebook depends on: what it measures with, not how its results are shown.

That is its code up to "## Results", its parameters, the version of torch, the core of the library, and the
benches and rooms that this code names. A change of a colour, a plot or a sentence measures nothing again.
"""

import ast
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

import cs336_systems

PACKAGE = Path(cs336_systems.__file__).parent
_ALWAYS = {".", "attention", "measure"}  # a model calls attention
_ROOMS = {"accounting", "checks", "kernels", "parallel", "training"}
# They show and keep what was measured; a change there changes no measurement.
_SHOW_AND_KEEP = {"__main__", "files", "rows", "schema", "validation"}


def fingerprint(notebook: NotebookNode, parameters: Mapping[str, Any]) -> str:
    """A digest that changes when the notebook, run with these parameters, may measure something else."""
    measuring = takewhile(lambda cell: "\n## Results" not in f"\n{cell.source}", notebook.cells)
    code = _code("\n".join(cell.source for cell in measuring if cell.cell_type == "code"))
    # What is imported for plots changes nothing; what is used is in the rest of the code.
    used = re.sub(r"^(from|import) .*", "", code, flags=re.MULTILINE)
    parts = [json.dumps(parameters, sort_keys=True), importlib.metadata.version("torch"), used]
    parts += [f"{path.name} {_code(_read(path))}" for path in sorted(modules_behind(code))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def modules_behind(code: str) -> set[Path]:
    """The modules of the library that may change what some code measures.

    A bench counts when its name, or the name of something that it defines for others, is among the words.
    """
    benches, waiting, words = set(PACKAGE.glob("bench/[!_]*.py")), [code], set()
    found: set[Path] = set()
    while waiting:
        words |= set(re.findall(r"\w+", waiting.pop()))
        named = {path for path in benches - found if words & {path.stem, *_offered(path)}}
        found |= named
        waiting += [_code(_read(path)) for path in named]
    folders = [PACKAGE / room for room in _ALWAYS | (_ROOMS & words)]
    core = {path for folder in folders for path in folder.glob("*.py") if path.stem not in _SHOW_AND_KEEP}
    return found | core


def _code(source: str) -> str:
    """The code without its comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def _offered(path: Path) -> set[str]:
    """Public functions and classes of a module."""
    return set(re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", _read(path), re.MULTILINE))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
