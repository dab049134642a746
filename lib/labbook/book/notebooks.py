"""The notebooks there are, `NN_slug.ipynb` in one folder: their names, their parameters, what they need.

What holds for this workbook alone stands in `book.yaml` there, and what a parameter may be, which is checked
before anything runs, in `parameters.yaml`: papermill itself warns about an unknown name and takes any value.
"""

import ast
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import nbformat
import yaml
from nbformat import NotebookNode
from papermill.models import Parameter
from papermill.translators import PythonTranslator

from labbook.code import notebook_of
from labbook.project import project, read_yaml


class BatchError(ValueError):
    """What was asked cannot be carried out."""


def folder() -> Path:
    """Where the project's notebooks are."""
    return project().notebooks


def read(path: Path) -> NotebookNode:
    """The notebook in a file."""
    return nbformat.read(path, as_version=4)


def paths(folder: Path) -> list[Path]:
    """The workbook's notebooks in a folder; others, an Untitled.ipynb, are none of them."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def load_notebooks() -> dict[str, dict[str, Parameter]]:
    """Every notebook by its name without `.ipynb`, with its parameters."""
    parameters = {}
    for path in paths(folder()):
        try:
            parameters[path.stem] = read_parameters(read(path))
        except Exception as error:  # nbformat has an exception for every way of being no notebook
            raise BatchError(f"{path.name} cannot be run: {error}") from None
    return parameters


def read_parameters(notebook: NotebookNode) -> dict[str, Parameter]:
    """The parameters of a notebook in their order, lines `name = literal  # comment` of its cell of that tag.

    Raises ValueError: what a parameter is set to is no literal.
    """
    cells = [cell for cell in notebook.cells if "parameters" in tags_of(cell)]
    # papermill has defaults as text.
    return {
        parameter.name: parameter._replace(default=ast.literal_eval(parameter.default))
        for cell in cells
        for parameter in PythonTranslator.inspect(cell)
    }


def tags_of(cell: NotebookNode) -> list[str]:
    """By which it is found, folded and shown."""
    return cell.metadata.get("tags", [])


def book(name: str) -> dict:
    """What `book.yaml` says under a name."""
    return read_yaml(folder() / "book.yaml").get(name, {})


def resolve(words: Iterable[str], notebooks: Collection[str]) -> list[str]:
    """The notebooks meant by numbers ("11"), slugs, names or paths.

    Raises BatchError: a word means none of them, or several.
    """
    meant = []
    for word in words:
        stem = Path(word).name.removesuffix(".ipynb")
        names = [name for name in notebooks if stem in [name] + name.split("_", 1)]
        if len(names) != 1:  # a copy of a notebook has its number, too
            raise BatchError(unknown("notebook", stem, names or notebooks))
        meant += names
    return list(dict.fromkeys(meant))  # in order, each once


def unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    return f"unknown {kind} {name!r}; allowed: {', '.join(allowed) or 'none'}"


def is_last(name: str) -> bool:
    """Whether a notebook shows what the others found: executed after them, and whatever changed."""
    return name in book("last")


def why_not_here(name: str) -> str:
    """Why the notebook of this name cannot run on this machine; empty when it can."""
    for package, names in book("needs").items():
        if name in names and not find_spec(package):
            return f"needs {package}, which is not installed here"
    return ""


# What a parameter may be.

# YAML's own numbers would not do: 064 is 52 there, 1:30 is 90, and 1e-3 is text.
_PARSERS = {
    list: lambda text: yaml.load(text, yaml.BaseLoader),
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
}


def convert(default, value):
    """Text, or a list that YAML gives as text, as the type of a default; as it is where it cannot be that."""
    if isinstance(value, str):
        with suppress(KeyError, ValueError, yaml.YAMLError):
            value = _PARSERS[type(default)](value)
    if isinstance(default, list) and isinstance(value, list):
        return [convert(default[0], item) for item in value]
    return value


def check_parameters(slug: str, values: Mapping) -> None:
    """Refuse, inside the notebook NN_<slug>, what it cannot run with; `values` are its `globals()`.

    Raises BatchError: a line for each wrong value, naming what is allowed.
    """
    parameters = read_parameters(read(notebook_of(slug)))
    settings = {name: values[name] for name in parameters if name in values}
    if errors := parameter_errors(parameters, settings, slug):
        raise BatchError("\n".join(errors))


def parameter_errors(
    parameters: Mapping[str, Parameter], settings: Mapping, slug: str = ""
) -> list[str]:
    """A sentence for each setting whose parameter is unknown, or whose value cannot be right.

    Raises ValueError: parameters.yaml cannot be read.
    """
    errors = []
    for name, value in settings.items():
        if name not in parameters:
            errors.append(unknown("parameter", name, parameters))
        elif allowed := _other_type(value, parameters[name].default):
            errors.append(f"{name} is {value!r}; allowed: {allowed}")
    if errors:
        return errors
    rules = rules_of(slug)
    values = {name: parameter.default for name, parameter in parameters.items()} | settings
    for name in values:
        rule = rules.get(name, {})
        # Under `by` and `multiple_of` stand other parameters; no other text in a rule is one's name.
        reads = {name}.union(map(str, rule.values()))
        # Other defaults may be wrong here: a size of another edition.
        if settings.keys() & reads:
            errors.append(_value_error(name, rule, values))
    return list(filter(None, errors))


def rules_of(slug: str) -> dict[str, dict]:
    """The rules for parameters of a notebook, by their names."""
    file = read_yaml(folder() / "parameters.yaml")
    return file.get("every notebook", {}) | file.get(slug, {})


def _other_type(value, default):
    """What a value has to be, if it is not of the type of the default."""
    kind = type(_items(default)[0])
    kinds = (int, float) if kind is float else (kind,)
    is_list = isinstance(default, list)
    # By type(), for which True is no number.
    are_right = all(type(item) in kinds for item in _items(value))
    if are_right and isinstance(value, list | tuple) == is_list:
        return ""
    return f"{'a list of ' if is_list else ''}{kind.__name__}, like {default!r}"


def _value_error(name, rule, values):
    """Of a value of the right type: a word that means nothing, a number that makes no sense."""
    items = _items(values[name])
    if not items and not rule.get("may_be_empty"):
        return f"{name} is an empty list; allowed: one item or more"
    if len(set(items)) < len(items):
        return f"{name} has one twice: {items}; allowed: once"
    words = _words(rule, values)
    for item in items:
        allowed = _other_number(item, rule, values) if "most" in rule else _other_word(item, words)
        if allowed:
            return f"{name} has {item!r}; allowed: {allowed}"
    return ""


def _words(rule, values):
    """What the value may be, in order; empty where it is no word."""
    words = rule.get("words", [])
    if isinstance(words, str):  # "module:name", of a collection, or of a function that returns one
        words = resolve_name(words)
        words = words() if callable(words) else words
    if "by" in rule:
        words = words.get(values[rule["by"]], ())
    return list(words) + rule.get("also", [])


def _other_word(word, words):
    """The words that are allowed, if this one is not; everything is where there are none."""
    if not words or any(fnmatchcase(str(word), str(pattern)) for pattern in words):
        return ""
    return ", ".join(map(str, words))


def _other_number(number, rule, values):
    """The numbers that are allowed, if this one is not."""
    if not rule["least"] <= number <= rule["most"]:  # nor is NaN
        return f"{rule['least']} to {rule['most']}"
    if rule.get("power_of_two") and number.bit_count() > 1:
        return "a power of two"
    # A number, or the parameter whose number or numbers it has to be a multiple of.
    divisor = rule.get("multiple_of", 0)
    divisors = _items(values.get(divisor, divisor))
    if any(number % part for part in divisors if part > 0):
        return f"a multiple of {divisor}"
    return ""


def _items(value):
    return value if isinstance(value, list | tuple) else [value]
