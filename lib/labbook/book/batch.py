"""The plan of a batch: what `notebooks/batch.yaml` asks of this machine, checked before anything runs."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import nbformat
import yaml

from labbook.book.parameters import Parameter, parameter_errors, parse_value, read_parameters

REPOSITORY = Path(__file__).resolve().parents[3]
NOTEBOOKS = REPOSITORY / "notebooks"
RUNS = REPOSITORY / "runs"
PROFILES = ("cpu", "gpu", "multi-gpu")


class BatchError(ValueError):
    """A plan that cannot be carried out as asked."""


@dataclass(frozen=True)
class Job:
    """One notebook with one set of parameters."""

    notebook: Path
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its files: the notebook, parameters to read, and a digest of all of them to tell apart."""
        if not self.parameters:
            return self.notebook.stem
        short = [str(value) for value in self.parameters.values() if isinstance(value, str | int | float)]
        digest = hashlib.sha256(json.dumps(self.parameters, sort_keys=True).encode()).hexdigest()[:6]
        return "-".join(re.sub(r"[^\w.-]+", "_", word) for word in [self.notebook.stem, *short[:4], digest])

    def line(self) -> str:
        """The parameters as one would give them."""
        texts = {name: v if isinstance(v, str) else json.dumps(v) for name, v in self.parameters.items()}
        return " ".join(f"{name}={text}" for name, text in texts.items())


def load_notebooks() -> dict[str, dict[str, Parameter]]:
    """Every notebook by its name without `.ipynb`, with its parameters."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        try:
            found[path.stem] = read_parameters(nbformat.read(path, as_version=4))
        except Exception as error:  # nbformat has an exception for every way of being no notebook
            raise BatchError(f"{path.name} cannot be run: {error}") from None
    return found


def plan(profile: str, *, only: Sequence[str] = (), overrides: Sequence[str] = ()) -> list[Job]:
    """The jobs of a profile, everything about them checked.

    Args:
        profile: "cpu", "gpu" or "multi-gpu".
        only: notebooks to keep, as number ("11"), slug or name; what the profile lacks runs with defaults.
        overrides: "name=value", for every notebook that has the parameter; a name given twice is a grid.

    Raises:
        BatchError: a line for each unknown notebook or parameter and wrong value, naming what is allowed.
    """
    notebooks = load_notebooks()
    entries = _entries(profile, _read_yaml(NOTEBOOKS / "batch.yaml"))
    if unknown := dict.fromkeys(name for name, _ in entries if name not in notebooks):
        lines = [f"batch.yaml: {_unknown('notebook', name, notebooks)}" for name in unknown]
        raise BatchError("\n".join(lines))
    if only:
        names = resolve(only, notebooks)
        planned = {name for name, _ in entries}
        entries = [entry for entry in entries if entry[0] in names]
        entries += [(name, {}) for name in dict.fromkeys(names) if name not in planned]
    given = _parse_overrides(overrides, {name: notebooks[name] for name, _ in entries})
    jobs, errors = [], {}
    for name, parameters in entries:
        for changed in _grid(given.get(name, {})):
            job = Job(NOTEBOOKS / f"{name}.ipynb", parameters | changed)
            if job not in jobs:
                jobs.append(job)
                found = parameter_errors(notebooks[name], job.parameters, name.partition("_")[2])
                errors |= dict.fromkeys(f"{name}: {error}" for error in found)
    if errors:
        raise BatchError("\n".join(errors))
    return jobs


def check_parameters(slug: str, values: Mapping[str, Any]) -> None:
    """Refuse, inside a notebook, what it cannot run with: papermill itself takes any value.

    Args:
        slug: of the notebook's problem.
        values: by name, as `globals()` has them; other names than its parameters are left alone.

    Raises:
        BatchError: a line for each wrong value, naming what is allowed.
    """
    (path,) = NOTEBOOKS.glob(f"[0-9][0-9]_{slug}.ipynb")
    known = read_parameters(nbformat.read(path, as_version=4))
    given = {name: values[name] for name in known if name in values}
    if errors := parameter_errors(known, given, slug):
        raise BatchError("\n".join(errors))


def _read_yaml(path: Path) -> dict[str, list]:
    try:
        profiles = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise BatchError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(profiles, dict) or not all(isinstance(entries, list) for entries in profiles.values()):
        raise BatchError(f"{path.name}: allowed: profiles ({', '.join(PROFILES)}), each a list")
    return profiles


def _entries(profile: str, profiles: dict[str, list], seen: tuple[str, ...] = ()) -> list[tuple[str, dict]]:
    """(notebook, parameters) for each point of each grid of a profile, with the profiles that it includes."""
    if profile not in profiles or profile in seen:
        what = "includes itself" if profile in seen else "is unknown"
        raise BatchError(f"profile {profile!r} {what}; allowed: {', '.join(profiles)}")
    entries = []
    for entry in profiles[profile]:
        match entry:
            case {"profile": other, **rest} if not rest:
                entries += _entries(other, profiles, (*seen, profile))
            case {"notebook": str(name), **rest} if rest.keys() <= {"parameters", "grid"}:
                grid = rest.get("grid", {})
                if not all(isinstance(values, list) and values for values in grid.values()):
                    raise BatchError(f"batch.yaml, {name}: grid is {grid!r}; allowed: a list of values each")
                entries += [(name, rest.get("parameters", {}) | point) for point in _grid(grid)]
            case _:
                allowed = "notebook with parameters and grid, or profile"
                raise BatchError(f"batch.yaml, {profile}: {entry!r}; allowed: {allowed}")
    return entries


def _grid(values: dict[str, list]) -> Iterable[dict[str, Any]]:
    """Every combination, the last name varying fastest; no names give one empty combination."""
    return (dict(zip(values, point, strict=True)) for point in product(*values.values()))


def resolve(words: Iterable[str], notebooks: Collection[str]) -> list[str]:
    """The notebooks meant by numbers ("11"), slugs, names or paths."""
    meant = {}
    for name in notebooks:
        number, _, slug = name.partition("_")
        meant |= {name: name, number: name, slug: name}
    stems = [Path(word).name.removesuffix(".ipynb") for word in words]
    for stem in stems:
        if stem not in meant:
            raise BatchError(_unknown("notebook", stem, notebooks))
    return [meant[stem] for stem in stems]


def _unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    return f"unknown {kind} {name!r}; allowed: {', '.join(allowed)}"


def _parse_overrides(
    overrides: Sequence[str], notebooks: dict[str, dict[str, Parameter]]
) -> dict[str, dict[str, list]]:
    """The values of each `name=value` for each of the notebooks that has the name."""
    parsed: dict[str, dict[str, list]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        having = [notebook for notebook, known in notebooks.items() if name in known]
        if not equals or not having:
            names = sorted({name for known in notebooks.values() for name in known})
            raise BatchError(f"-p {override}: {_unknown('parameter', name, names)}")
        for notebook in having:
            try:
                value = parse_value(notebooks[notebook][name], text)
            except ValueError as error:
                raise BatchError(f"{notebook}: {error}") from None
            parsed.setdefault(notebook, {}).setdefault(name, []).append(value)
    return parsed
