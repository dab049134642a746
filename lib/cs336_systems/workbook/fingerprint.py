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
from pathlib import Path
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
    code = _without_docstrings(ast.parse(_measuring_code(notebook)))
    paths = reached(code)
    code.body = [
        node for node in code.body if not imported(node)
    ]  # of plots, too; what is used is in the code
    parts = [json.dumps(parameters, sort_keys=True), importlib.metadata.version("torch"), ast.dump(code)]
    parts += [f"{path.name} {ast.dump(_parsed(path))}" for path in sorted(paths)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def reached(code: ast.Module) -> set[Path]:
    """The library's modules that the imports of some code reach, directly or through each other.

    Of `from cs336_systems.bench import sweep_attention`, or `bench.sweep_attention`, only the module that
    defines it counts.
    """
    found: set[Path] = {PACKAGE / "__init__.py"}
    waiting = [code]
    while waiting:
        tree = waiting.pop()
        for target in filter(None, _all_targets(tree)):
            for path in _files(target):
                if path not in found and not path.relative_to(PACKAGE).as_posix().startswith(_OTHER):
                    found.add(path)
                    waiting.append(_parsed(path))
    return found


def _measuring_code(notebook: NotebookNode) -> str:
    sources = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and "\n## Results" in f"\n{cell.source}":
            break
        if cell.cell_type == "code":
            sources.append(cell.source)
    return "\n".join(sources)


def _parsed(path: Path) -> ast.Module:
    return _without_docstrings(ast.parse(path.read_text(encoding="utf-8")))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)] or [ast.Pass()]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def imported(node: ast.AST) -> list[str]:
    """What an import statement names in the library: "cs336_systems.bench.sweep_attention"."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _NAME:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith(f"{_NAME}.")]
    return []


def _all_targets(tree: ast.Module) -> Iterator[str]:
    """Everything of the library that some code names: in imports, as text, or through the registry."""
    targets = [target for node in ast.walk(tree) for target in imported(node)]
    rooms = {target.split(".")[1]: target for target in targets if (PACKAGE / target.split(".")[-1]).is_dir()}
    yield from (target for target in targets if target not in rooms.values())
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in rooms:
            yield f"{rooms[node.value.id]}.{name}"
        if isinstance(node, ast.Constant) and _DOTTED.fullmatch(str(node.value)):
            yield node.value.replace(":", ".")
        registry = getattr(names, name, {}) if name.isupper() else {}
        for entry in registry.values() if isinstance(registry, dict) else ():
            yield getattr(entry, "function", "").replace(":", ".")


def _files(target: str) -> list[Path]:
    """The module that a dotted name is, or those of its room that define it; all of the room if none does."""
    folder = PACKAGE
    for part in target.split(".")[1:]:
        if (module := folder / f"{part}.py").is_file():
            return [module]
        if not (folder / part).is_dir():
            modules = sorted(folder.glob("*.py"))
            return [path for path in modules if part in _defined(path)] or modules
        folder /= part
    return sorted(folder.glob("*.py"))


@cache
def _defined(path: Path) -> set[str]:
    """Names of the functions, classes and constants of a module."""
    tree = _parsed(path)
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [node.targets if isinstance(node, ast.Assign) else [node.target] for node in tree.body
                if isinstance(node, ast.Assign | ast.AnnAssign)]  # fmt: skip
    return found | {name.id for targets in assigned for name in targets if isinstance(name, ast.Name)}
