"""What a notebook's `parameters` cell offers, and whether given values fit it, before anything runs.

papermill itself only warns about an unknown name and takes a value of any type.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from typing import Any

import yaml
from nbformat import NotebookNode

from cs336_systems.configs import MODEL_SIZES, model_size
from cs336_systems.measure.machine import machines
from cs336_systems.workbook.choices import choices

# Whole numbers from 1 on; all others from 0 on.
_POSITIVE = ("batch_size", "context_length", "model_batch_size", "model_context_length")
_POSITIVE += ("d_head", "steps", "world_size")
_SINGULARS = {"pass_": "pass", "passes": "pass", "strategies": "strategy"}
_TYPE_NAMES = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text",
    list: "a list", dict: "a mapping", type(None): "null",
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell."""

    name: str
    default: Any
    comment: str


def read_parameters(notebook: NotebookNode) -> dict[str, Parameter]:
    """The parameters of a notebook in their order; a notebook without a `parameters` cell has none.

    Raises:
        ValueError: several such cells, or a line in one that is not `name = literal`.
    """
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) > 1:
        raise ValueError(f"{len(cells)} code cells are tagged `parameters`; allowed: one")
    source = cells[0].source if cells else ""
    found = {}
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"the parameters cell is not Python: {error}") from None
    for statement in statements:
        text = ast.unparse(statement)
        if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
            raise ValueError(f"the parameters cell has `{text}`; allowed: name = literal")
        try:
            default = ast.literal_eval(statement.value)
        except ValueError:
            raise ValueError(f"the parameters cell has `{text}`; allowed: name = literal") from None
        name = statement.targets[0].id
        found[name] = Parameter(name, default, _comment(statement, source))
    return found


def _comment(statement: ast.stmt, source: str) -> str:
    """The comment on a statement's own lines, or alone on the line above."""
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    above = statement.lineno - 1
    if above in comments and not lines[above - 1].lstrip().startswith("#"):
        del comments[above]
    return " ".join(comments[n] for n in range(above, statement.end_lineno + 1) if n in comments)


def parse_value(parameter: Parameter, text: str) -> Any:
    """The value meant by `-p name=text`: text stays text where the default is text ("10B"), else as in YAML.

    Raises:
        ValueError: the text is not YAML.
    """
    if isinstance(parameter.default, str):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{parameter.name}={text}: allowed: {describe(parameter.default)}") from None


def parameter_errors(known: dict[str, Parameter], given: dict[str, Any], slug: str = "") -> list[str]:
    """A sentence for each given parameter that the notebook does not have or that cannot be right.

    Args:
        known: of the notebook.
        given: values by name.
        slug: of the notebook's problem, which has words of its own.
    """
    errors = []
    for name, value in given.items():
        if name not in known:
            errors.append(f"unknown parameter {name!r}; allowed: {', '.join(known) or 'none'}")
        elif not _same_type(value, known[name].default):
            errors.append(f"{name} is {value!r}; allowed: {describe(known[name].default)}")
    if errors:
        return errors
    values = {name: parameter.default for name, parameter in known.items()} | given
    changed = [name for name in values if name in given or _singular(name) == "model_size"]
    return [error for name in changed for error in _word_errors(name, values, slug)]


def describe(default: Any) -> str:
    """What may stand where this default stands: "a list of whole numbers, like [128, 256]"."""
    if isinstance(default, list) and default:
        kind = _TYPE_NAMES[type(default[0])].removeprefix("a ")
        return f"a list, each item {'a ' if kind != 'text' else ''}{kind}, like {default!r}"
    return f"{_TYPE_NAMES[type(default)]}, like {default!r}"


def _same_type(value: Any, default: Any) -> bool:
    if isinstance(default, list | tuple):
        items = value if isinstance(value, list | tuple) else []
        return bool(items) and all(_same_type(item, default[0]) for item in items if default)
    if default is None or value is None:
        return default is None
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def _word_errors(name: str, values: dict[str, Any], slug: str) -> list[str]:
    """Errors of a value of the right type: a word out of its vocabulary, a number below what makes sense."""
    items = values[name] if isinstance(values[name], list | tuple) else [values[name]]
    stem, edition = _singular(name), values.get("edition", 2025)
    if stem == "model_size" and edition in MODEL_SIZES:
        return [error for item in items for error in _size_errors(item, edition)]
    if allowed := machines() if stem == "reference" else choices(slug, stem):
        bad = [item for item in items if item not in allowed and _pattern(item) not in allowed]
        return [f"{name} has {bad[0]!r}; allowed: {', '.join(map(str, allowed))}"] if bad else []
    least = 1 if stem in _POSITIVE else 0
    bad = [item for item in items if type(item) is int and item < least]
    return [f"{name} has {bad[0]}; allowed: {least} or more"] if bad else []


def _size_errors(name: str, edition: int) -> list[str]:
    try:
        model_size(name, edition)
    except ValueError as error:
        return [str(error)]
    return []


def _pattern(word: Any) -> str:
    """The word with its number left open: "every 3" is one of "every N"."""
    return re.sub(r"\b[1-9]\d*\b", "N", str(word))


def _singular(name: str) -> str:
    if name in _SINGULARS:
        return _SINGULARS[name]
    return name if name in ("pass", "steps") else name.removesuffix("s")
