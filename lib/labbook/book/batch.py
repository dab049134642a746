"""The plan of a batch: what `notebooks/batch.yaml` asks of this machine, checked before anything runs."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from labbook.book import notebooks
from labbook.book.notebooks import BatchError, convert, load_notebooks, parameter_errors, resolve, unknown

PROFILES = {"cpu": 0, "gpu": 1, "multi-gpu": 2, "links": 0}  # with the GPUs that each needs


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


def plan(profile: str, *, only: Sequence[str] = (), overrides: Sequence[str] = ()) -> list[Job]:
    """The jobs of a profile, everything about them checked.

    Args:
        profile: one of PROFILES.
        only: the notebooks to keep, as `resolve` takes them; what the profile lacks runs with defaults.
        overrides: "name=value", for every notebook that has the parameter; a name given twice is a grid.

    Raises:
        BatchError: a line for each unknown notebook or parameter and wrong value, naming what is allowed.
    """
    known = load_notebooks()
    # Numbers as text, to be read as those of the command line are
    entries = list(_entries(profile, notebooks.read_yaml("batch.yaml", yaml.BaseLoader)))
    if strange := dict.fromkeys(name for name, _ in entries if name not in known):
        raise BatchError("\n".join(f"batch.yaml: {unknown('notebook', name, known)}" for name in strange))
    if only:
        names, planned = resolve(only, known), {name for name, _ in entries}
        entries = [entry for entry in entries if entry[0] in names]
        entries += [(name, {}) for name in names if name not in planned]
    names = sorted({name for notebook, _ in entries for name in known[notebook]})
    given = defaultdict(list)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or name not in names:
            raise BatchError(f"-p {override}: {unknown('parameter', name, names)}")
        given[name].append(text)
    jobs, errors = {}, {}  # as sets that keep their order
    for name, texts in entries:
        types = {key: parameter.default for key, parameter in known[name].items()}
        for changed in _grid({key: given[key] for key in given if key in known[name]}):
            values = {key: convert(types.get(key, ""), text) for key, text in (texts | changed).items()}
            job = Job(notebooks.NOTEBOOKS / f"{name}.ipynb", values)
            jobs.setdefault(job.name, job)
            found = parameter_errors(known[name], job.parameters, name.partition("_")[2])
            errors |= dict.fromkeys(f"{name}: {error}" for error in found)
    if errors:
        raise BatchError("\n".join(errors))
    return [*jobs.values()]


def _entries(
    profile: str, profiles: dict[str, Any], seen: tuple[str, ...] = ()
) -> Iterable[tuple[str, dict]]:
    """(notebook, parameters) for each point of each grid of a profile, with the profiles that it includes."""
    if profile not in profiles or profile in seen:
        what = "includes itself" if profile in seen else "is unknown"
        raise BatchError(f"profile {profile!r} {what}; allowed: {', '.join(profiles)}")
    for entry in profiles[profile] or []:
        match {"parameters": {}, "grid": {}} | entry if isinstance(entry, dict) else entry:
            case {"profile": str(other)} if len(entry) == 1:
                yield from _entries(other, profiles, (*seen, profile))
            case {"notebook": str(name), "parameters": dict(values), "grid": dict(grid), **rest} if (
                not rest and all(isinstance(each, list) and each for each in grid.values())
            ):
                yield from ((name, values | point) for point in _grid(grid))
            case _:
                allowed = "notebook with parameters (a value each) and grid (a list each), or profile"
                raise BatchError(f"batch.yaml, {profile}: {entry!r}; allowed: {allowed}")


def _grid(values: dict[str, list]) -> Iterable[dict[str, Any]]:
    """Every combination, the last name varying fastest; no names give one empty combination."""
    return (dict(zip(values, point, strict=True)) for point in product(*values.values()))
