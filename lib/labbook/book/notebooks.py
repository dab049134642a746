"""The notebooks there are, `NN_slug.ipynb` in one folder: their names, what they need, their parameters.

What holds for this workbook alone stands in `book.yaml` there, and what a parameter may be, which is checked
before anything runs, in `parameters.yaml`: papermill itself warns about an unknown name and takes any value.
"""

import ast
import operator
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import nbformat
import yaml
from nbformat import NotebookNode
from papermill.models import Parameter
from papermill.translators import PythonTranslator

from labbook.code import notebook_of
from labbook.project import project

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
# YAML's own numbers would not do: 064 is 52 there, 1:30 is 90, and 1e-3 is text.
_OF_TEXT = {list: lambda text: yaml.load(text, yaml.BaseLoader), int: int, float: float, str: str}
_OF_TEXT[bool] = lambda text: {"true": True, "false": False}[text.lower()]
_LIMITS = {  # what is true of a right number, and how it is said
    "least": (operator.ge, "{} or more"),
    "above": (operator.gt, "above {}"),
    "most": (operator.le, "{} or less"),
    "power_of_two": (lambda number, _: number & (number - 1) == 0, "a power of two"),
    "multiple_of": (lambda number, limit: limit <= 0 or number % limit == 0, "a multiple of {}"),
}
_RULE = {*_LIMITS, "words", "by", "also", "may_be_empty"}


class BatchError(ValueError):
    """What was asked cannot be carried out."""


def folder() -> Path:
    """Where the project's notebooks are."""
    return project().notebooks


def load_notebooks() -> dict[str, dict[str, Parameter]]:
    """Every notebook by its name without `.ipynb`, with its parameters."""
    found = {}
    for path in sorted(folder().glob("*.ipynb")):
        try:
            found[path.stem] = read_parameters(nbformat.read(path, as_version=4))
        except Exception as error:  # nbformat has an exception for every way of being no notebook
            raise BatchError(f"{path.name} cannot be run: {error}") from None
    return found


def read_parameters(notebook: NotebookNode) -> dict[str, Parameter]:
    """The parameters of a notebook in their order; a notebook without a `parameters` cell has none.

    Raises ValueError: several such cells, or a line in one that is not `name = literal  # comment`.
    """
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) > 1:
        raise ValueError(f"{len(cells)} code cells are tagged `parameters`; allowed: one")
    found, seen = {}, {each.name: each for cell in cells for each in PythonTranslator.inspect(cell)}
    for line in ast.parse(cells[0].source).body if cells else ():
        try:  # papermill passes over some lines, and has defaults as text
            (name,) = [target.id for target in line.targets]
            found[name] = seen[name]._replace(default=ast.literal_eval(line.value))
        except (AttributeError, KeyError, ValueError):
            told = f"the parameters cell has `{ast.unparse(line)}`"
            raise ValueError(f"{told}; allowed: name = literal  # comment") from None
    return found


def read_yaml(name: str, loader: type = yaml.SafeLoader) -> dict[str, Any]:
    """A file of the folder of notebooks."""
    try:
        return _parsed((folder() / name).read_text(encoding="utf-8"), loader)
    except yaml.YAMLError as error:
        raise BatchError(f"{name} cannot be read: {' '.join(str(error).split())}") from None


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


def convert(default: Any, given: Any) -> Any:
    """Text, or a list that YAML gives as text, as the type of a default; as it is where it cannot be that."""
    if isinstance(given, str):
        with suppress(KeyError, ValueError, yaml.YAMLError):
            given = _OF_TEXT[type(default)](given)
    several = isinstance(default, list) and isinstance(given, list)
    return [convert(default[0], item) for item in given] if several else given


def check_parameters(slug: str, values: Mapping[str, Any]) -> None:
    """Refuse, inside the notebook NN_<slug>, what it cannot run with; `values` are its `globals()`.

    Raises BatchError: a line for each wrong value, naming what is allowed.
    """
    known = read_parameters(nbformat.read(notebook_of(slug), as_version=4))
    given = {name: values[name] for name in known if name in values}
    if errors := parameter_errors(known, given, slug):
        raise BatchError("\n".join(errors))


def parameter_errors(
    known: Mapping[str, Parameter], given: Mapping[str, Any], slug: str = ""
) -> list[str]:
    """A sentence for each given parameter that is not among the known or that cannot be right.

    Raises BatchError: parameters.yaml cannot be read, or has a rule of an unknown kind.
    """
    errors = [unknown("parameter", name, known) for name in given if name not in known]
    for name, value in [(name, given[name]) for name in given if name in known]:
        default = known[name].default
        several, kind = isinstance(default, list), type(_listed(default)[0])
        fits = {*map(type, _listed(value))} <= {kind, *([int] if kind is float else [])}
        if not fits or several != isinstance(value, list | tuple):
            allowed = f"{'a list, each item ' * several}{_TYPES[kind]}, like {default!r}"
            errors.append(f"{name} is {value!r}; allowed: {allowed}")
    if errors:
        return errors
    rules = rules_of(slug)
    values = {name: parameter.default for name, parameter in known.items()} | given
    # Of the others only those whose rule looks at a given one: a default size may not be of another edition
    asked = {each: rules.get(each, {}) for each in values}
    asked = {
        each: rule
        for each, rule in asked.items()
        if given.keys() & {each, *map(str, rule.values())}
    }
    return [error for name, rule in asked.items() if (error := _value_error(name, rule, values))]


def rules_of(slug: str) -> dict[str, dict[str, Any]]:
    """The rules for parameters of a notebook, by their names."""
    file = read_yaml("parameters.yaml")
    rules = (file.get("every notebook") or {}) | (file.get(slug) or {})
    for name, rule in rules.items():
        if not isinstance(rule, dict) or rule.keys() - _RULE:
            raise BatchError(
                f"parameters.yaml, {name}: {rule!r}; allowed: {', '.join(sorted(_RULE))}"
            )
    return rules


def _value_error(name: str, rule: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Of a value of the right type: a word that means nothing, a number that makes no sense."""
    items = _listed(values[name])
    if not items and not rule.get("may_be_empty"):
        return f"{name} is an empty list; allowed: one item or more"
    words = rule.get("words", [])
    if isinstance(words, str):  # "module:name", of a collection, or of a function that returns one
        words = resolve_name(words)
        words = words() if callable(words) else words
    words = [*(words.get(values[rule["by"]], ()) if "by" in rule else words), *rule.get("also", ())]
    limits = {kind: _listed(values.get(rule[kind], rule[kind])) for kind in _LIMITS if kind in rule}
    for item in items:
        # "every 3" is allowed where "every N" is
        pattern = re.sub(r"(?<= )[1-9]\d*$", "N", item) if isinstance(item, str) else item
        if words and not {item, pattern} & {*words}:  # there are none where it is no word
            return f"{name} has {item!r}; allowed: {', '.join(map(str, words))}"
        if items.count(item) > 1:
            return f"{name} has {item!r} twice; allowed: once"
        if isinstance(item, str | bool):
            continue
        if not abs(item) <= sys.float_info.max:
            return f"{name} has {item}; allowed: a finite number"
        if not all(_LIMITS[kind][0](item, limit) for kind in limits for limit in limits[kind]):
            texts = [_LIMITS[kind][1].format(rule[kind]) for kind in limits]
            return f"{name} has {item}; allowed: {', '.join(texts)}"
    return ""


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
