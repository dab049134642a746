"""The notebooks there are, `NN_slug.ipynb` in one folder: their names, what they need, their parameters.

What holds for this workbook alone stands in `book.yaml` there.
"""

import ast
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import yaml
from nbformat import NotebookNode

from labbook.files import NOTEBOOKS


class BatchError(ValueError):
    """What was asked cannot be carried out."""


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell."""

    name: str
    default: Any
    comment: str


def load_notebooks() -> dict[str, dict[str, Parameter]]:
    """Every notebook by its name without `.ipynb`, with its parameters."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        try:
            found[path.stem] = read_parameters(nbformat.read(path, as_version=4))
        except Exception as error:  # nbformat has an exception for every way of being no notebook
            raise BatchError(f"{path.name} cannot be run: {error}") from None
    return found


def read_parameters(notebook: NotebookNode) -> dict[str, Parameter]:
    """The parameters of a notebook in their order; a notebook without a `parameters` cell has none.

    Raises:
        ValueError: several such cells, or a line in one that is not `name = literal  # comment`.
    """
    from papermill.translators import PythonTranslator  # not needed by who only reads names

    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) > 1:
        raise ValueError(f"{len(cells)} code cells are tagged `parameters`; allowed: one")
    found = {}
    for line in ast.parse(cells[0].source).body if cells else ():
        comments = {each.name: each.help for each in PythonTranslator.inspect(cells[0])}
        try:  # a line that papermill passes over has no comment there
            (name,) = [target.id for target in line.targets]
            found[name] = Parameter(name, ast.literal_eval(line.value), comments[name])
        except (AttributeError, KeyError, ValueError):
            told = f"the parameters cell has `{ast.unparse(line)}`"
            raise ValueError(f"{told}; allowed: name = literal  # comment") from None
    return found


def read_yaml(name: str, loader: type = yaml.SafeLoader) -> dict[str, Any]:
    """A file of the folder of notebooks, which holds a mapping."""
    try:
        found = _parsed((NOTEBOOKS / name).read_text(encoding="utf-8"), loader)
    except (OSError, yaml.YAMLError) as error:
        raise BatchError(f"{name} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise BatchError(f"{name} holds no mapping; allowed: names with what belongs to each")
    return found


_parsed = cache(yaml.load)


def resolve(words: Iterable[str], notebooks: Collection[str]) -> list[str]:
    """The notebooks meant by numbers ("11"), slugs, names or paths."""
    meant = {word: name for name in notebooks for word in (name, *name.split("_", 1))}
    stems = [Path(word).name.removesuffix(".ipynb") for word in words]
    if strange := [stem for stem in stems if stem not in meant]:
        raise BatchError(unknown("notebook", strange[0], notebooks))
    return list(dict.fromkeys(meant[stem] for stem in stems))


def unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    return f"unknown {kind} {name!r}; allowed: {', '.join(allowed) or 'none'}"


def is_last(name: str) -> bool:
    """Whether a notebook shows what the others found: executed after them, and whatever changed."""
    return name in read_yaml("book.yaml").get("last", [])


def why_not_here(name: str) -> str:
    """Why the notebook of this name cannot run on this machine; empty when it can."""
    for package, names in read_yaml("book.yaml").get("needs", {}).items():
        if name in names and find_spec(package) is None:
            return f"needs {package}, which is not installed here"
    return ""
