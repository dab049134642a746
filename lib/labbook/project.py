"""The project that labbook serves: a folder with notebooks and figures, and what its `book.yaml` declares."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

_DECLARATION = Path("notebooks", "book.yaml")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first where libyaml is there


@dataclass(frozen=True)
class Project:
    """A project; everything that `book.yaml` leaves out is empty.

    reference: the machine whose rows notebooks show; without one every machine is its own.
    committed: folders of `figures` that belong to the project; all others are everybody's own.
    several: problems whose rows are of several processes: among N GPUs their machine's name ends in -xN.
    measured: modules and packages that a timed step can execute. Of all modules these alone make rows old.
    """

    root: Path
    reference: str = ""
    committed: tuple[str, ...] = ()
    several: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()

    @property
    def notebooks(self) -> Path:
        return self.root / "notebooks"

    @property
    def figures(self) -> Path:
        return self.root / "figures"


def configure(folder: str | Path) -> None:
    """Serve the project in this folder, in this process and in those that it starts."""
    os.environ["LABBOOK_PROJECT"] = str(Path(folder).resolve())


def project() -> Project:
    """The project in the folder of `configure` or $LABBOOK_PROJECT, else the one around the working folder.

    Else, as in a process that was started somewhere else, that of labbook's own checkout.
    Raises FileNotFoundError: there is none; the message says how one is made.
    """
    folder = os.environ.get("LABBOOK_PROJECT")
    return _declared(Path(folder) if folder else _nearest())


@cache
def _nearest():
    here = Path.cwd()
    for folder in [here] + list(here.parents) + [Path(__file__).resolve().parents[2]]:
        if (folder / _DECLARATION).is_file():
            return folder
    raise FileNotFoundError(
        f"{here} is in no project, a folder with {_DECLARATION}; call labbook.configure(folder)"
    )


@cache
def _declared(root):
    declared = read_yaml(root / _DECLARATION)
    lists = {name: tuple(declared.get(name, ())) for name in ("committed", "several", "measured")}
    return Project(root, declared.get("reference", ""), **lists)


def read_yaml(path: Path) -> dict:
    """What a file of the project declares."""
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER) or {}
