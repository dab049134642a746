"""What a notebook's `parameters` cell offers, and whether given values fit it, before anything runs.

papermill itself only warns about an unknown name and takes a value of any type.
"""

import ast
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import yaml
from nbformat import NotebookNode
from papermill.translators import PythonTranslator

from cs336_systems.configs import MODEL_SIZES
from labbook.machine import machines

# Words that parameters of every notebook take, by the name of one of them; "module:name" is loaded on use.
_WORDS: dict[str, Iterable[Any] | str] = {
    "dtype": "cs336_systems.dtypes:DTYPES",
    "pass": "cs336_systems.training.steps:PASSES",
    "collective": "cs336_systems.accounting.collective_costs:COLLECTIVES",
    "attention": "cs336_systems.attention.implementations:MODEL_ATTENTION",
    "edition": MODEL_SIZES,
    "device": ("auto", "cpu", "cuda"),
    "source": ("auto", "nsys", "torch"),
    "backend": "cs336_systems.parallel.launch:BACKENDS",
    "optimizer": "cs336_systems.bench.drift_bench:OPTIMIZERS",
    "hardware": "cs336_systems.accounting.data_sheets:hardware_names",
    "tile_kernel": "cs336_systems.attention.config:KERNELS",
}
# Numbers from 1 on. All others are from 0 on, or as a comment says: "a power of two, 2 or more", "above 0".
_POSITIVE = ("batch_size", "context_length", "model_batch_size", "model_context_length")
_POSITIVE += ("d_head", "d_model", "d_ff", "steps", "token", "num_device", "world_size")
_SINGULARS = {"pass_": "pass", "pass": "pass", "passes": "pass", "strategies": "strategy", "steps": "steps"}
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
        ValueError: several such cells, or a line in one that is not `name = literal  # comment`.
    """
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) > 1:
        raise ValueError(f"{len(cells)} code cells are tagged `parameters`; allowed: one")
    found = {}
    for cell in cells:
        comments = {each.name: each.help for each in PythonTranslator.inspect(cell)}
        for line in ast.parse(cell.source).body:
            with suppress(AttributeError, KeyError, ValueError):  # or papermill passes over the line
                (target,) = line.targets
                default = ast.literal_eval(line.value)
                found[target.id] = Parameter(target.id, default, comments[target.id])
                continue
            raise ValueError(
                f"the parameters cell has `{ast.unparse(line)}`; allowed: name = literal  # comment"
            )
    return found


def parse_value(parameter: Parameter, text: str) -> Any:
    """The value meant by `-p name=text`: text where the default is text ("10B"), else as in YAML."""
    if isinstance(parameter.default, str):
        return text
    if isinstance(parameter.default, float):
        with suppress(ValueError):
            return float(text)  # 1e-3 is text in YAML
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{parameter.name}={text}: allowed: {describe(parameter.default)}") from None


def parameter_errors(known: dict[str, Parameter], given: dict[str, Any], slug: str = "") -> list[str]:
    """A sentence for each given parameter that is not among the known or that cannot be right.

    Args:
        slug: of the notebook's problem, which has implementations of its own.
    """
    errors = []
    for name, value in given.items():
        if name not in known:
            errors.append(f"unknown parameter {name!r}; allowed: {', '.join(known) or 'none'}")
        elif not _same_type(value, known[name].default):
            errors.append(f"{name} is {value!r}; allowed: {describe(known[name].default)}")
    if errors:
        return errors
    edition = given.get("edition", known["edition"].default if "edition" in known else 2025)
    values = {name: parameter.default for name, parameter in known.items() if name == "model_size"} | given
    found = (_value_error(known[name], value, edition, slug) for name, value in values.items())
    return list(filter(None, found))


def describe(default: Any) -> str:
    """What may stand where this default stands: "a list, each item a whole number, like [128, 256]"."""
    if isinstance(default, list) and default:
        return f"a list, each item {_TYPE_NAMES[type(default[0])]}, like {default!r}"
    return f"{_TYPE_NAMES[type(default)]}, like {default!r}"


def _same_type(value: Any, default: Any) -> bool:
    if isinstance(default, list):
        items = value if isinstance(value, list | tuple) else []
        return bool(items) and all(_same_type(item, default[0]) for item in items if default)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def _value_error(parameter: Parameter, value: Any, edition: int, slug: str) -> str:
    """Of a value of the right type: a word that means nothing, a number below what makes sense."""
    items = value if isinstance(value, list | tuple) else [value]
    stem = _SINGULARS.get(parameter.name, parameter.name.removesuffix("s"))
    allowed = _allowed(stem, parameter, edition, slug)
    if bad := [item for item in items if allowed and _pattern(item) not in allowed]:
        return f"{parameter.name} has {bad[0]!r}; allowed: {', '.join(map(str, allowed))}"
    if twice := [item for item in items if items.count(item) > 1]:
        return f"{parameter.name} has {twice[0]!r} twice; allowed: once"
    told = re.search(r"\b(\d+) or more\b", parameter.comment)
    least = int(told[1]) if told else int(stem in _POSITIVE)
    above_0 = "above 0" in parameter.comment
    for number in (each for each in items if isinstance(each, int | float) and not isinstance(each, bool)):
        if not number >= least or (above_0 and not number):
            return f"{parameter.name} has {number}; allowed: {'above 0' if above_0 else f'{least} or more'}"
        if re.search(r"\bpowers? of two\b", parameter.comment) and number & (number - 1):
            return f"{parameter.name} has {number}; allowed: powers of two"
    return ""


def _allowed(stem: str, parameter: Parameter, edition: int, slug: str) -> list[Any]:
    """The words that a parameter may have; none where it is no word.

    They are in the registry, or else the notebook's own: those of the default and those that its comment
    lists, "measured parts; also: tiles, models".
    """
    if stem == "reference":
        return machines()
    if stem == "model_size":
        return list(MODEL_SIZES.get(edition, MODEL_SIZES[2025]))
    words = _implementations(slug) if stem == "implementation" else _WORDS.get(stem, ())
    if words:
        found = resolve_name(words) if isinstance(words, str) else words
        return list(found() if callable(found) else found)
    default = parameter.default if isinstance(parameter.default, list) else [parameter.default]
    also = re.search(r"\balso: ([^;]+)", parameter.comment)
    listed = [word.strip() for word in also[1].split(",")] if also else []
    return [_pattern(word) for word in [*default, *listed]] if isinstance(default[0], str) else []


def _implementations(slug: str) -> str:
    """Where the names are of what is compared in the notebook of a problem."""
    if "ddp" in slug:
        return "cs336_systems.parallel.strategies:WRAPPERS"
    if "accounting" in slug:
        return "cs336_systems.parallel.strategies:SHARDINGS"
    own = {
        "torch_compile": "bench.model_bench:IMPLEMENTATIONS",
        "leaderboard": "training.full_steps:FULL_STEPS",
    }
    if slug == "weighted_sum":
        return ""  # those that its comment lists
    return f"cs336_systems.{own.get(slug, 'attention.implementations:ATTENTION')}"


def _pattern(word: Any) -> Any:
    """A word with its number left open, so that "every 3" is allowed where "every 1" is."""
    return re.sub(r"(?<= )[1-9]\d*\b", "N", word) if isinstance(word, str) else word
