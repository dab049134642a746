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
    """Serve the project in this folder, in this process and in those that it starts.

    A project is a folder with notebooks/book.yaml, which may be empty; rows need notebooks/tables.yaml, and a
    page notebooks/parameters.yaml, too.
    """
    os.environ["LABBOOK_PROJECT"] = str(Path(folder).resolve())


def project() -> Project:
    """The project in the folder of `configure` or $LABBOOK_PROJECT, else the one around the working folder.

    Else, as in a process that was started somewhere else, that of labbook's own checkout.
    Raises ValueError: there is none, or its `book.yaml` cannot be read; the message names that file.
    """
    folder = os.environ.get("LABBOOK_PROJECT")
    return _declared(Path(folder) if folder else _nearest())


@cache
def _nearest():
    """Without one it is the working folder, which then is refused."""
    here = Path.cwd()
    folders = [here] + list(here.parents) + [Path(__file__).resolve().parents[2]]
    return next((folder for folder in folders if (folder / _DECLARATION).is_file()), here)


@cache
def _declared(root):
    declared = read_yaml(root / _DECLARATION)
    lists = {
        name: tuple([] + declared.get(name, []))  # a word would be so many letters
        for name in ("committed", "several", "measured")
    }
    return Project(root, declared.get("reference", ""), **lists)


def read_yaml(path: Path, loader: type = _LOADER) -> dict:
    """What a file of the project declares, by name; nothing if it is empty.

    Raises ValueError: it cannot be read, or says something else; the message names it.
    """
    try:
        declared = _parsed(path.read_text(encoding="utf-8"), loader) or {}
        if not isinstance(declared, dict):
            raise ValueError("it is no mapping")
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read: {' '.join(str(error).split())}") from None
    return declared


_parsed = cache(yaml.load)  # by the text: files are edited while a kernel runs
