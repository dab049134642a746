"""Which versions the workbook was tried with: older ones are refused in a sentence, newer ones named in one.

The newest of each were tried together on a CPU, with Python 3.13: all tests and all notebooks; attention's
kernels of 16 bits were compiled ahead of time for GPUs from Ampere to Blackwell. On GPUs ran torch 2.11.

`python lib/cs336_systems/versions.py` says it of what is installed, as lib/setup.sh does. It imports nothing
but Python's own: importing torch takes seconds.
"""

import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

# Oldest and newest. pyproject.toml has the oldest alone: pip would refuse what nobody has tried.
TRIED = {
    "torch": ("2.11", "2.15"),
    "triton": ("3.6", "3.9"),
    "numpy": ("2.0", "2.5"),
    "pandas": ("2.2.3", "3.1"),
}


def installed() -> dict[str, str]:
    """The versions that are here, of TRIED; without triton where there is none."""
    versions = {}
    for name in TRIED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def too_old(versions: Mapping[str, str]) -> str:
    """A sentence with the bound and the command if one of these is older than what was tried, or nothing."""
    for name, number in versions.items():
        if _numbers(number) < _numbers(TRIED[name][0]):
            # The builds of torch bring the triton that they were made with.
            package = "torch" if name == "triton" else name
            bound = f"{name} {number} is too old, the workbook needs {TRIED[name][0]} or newer"
            return f"{bound}: make setup, or pip install '{package}>={TRIED[package][0]}'"
    return ""


def untried(versions: Mapping[str, str]) -> str:
    """A sentence that names what is newer than what was tried, or nothing."""
    # Of two numbers: 2.15.1 is no newer than 2.15.
    newer = [
        f"{name} {number} (tried up to {TRIED[name][1]})"
        for name, number in versions.items()
        if _numbers(number)[:2] > _numbers(TRIED[name][1])
    ]
    return f"newer than what the workbook was tried with: {', '.join(newer)}" if newer else ""


def _numbers(number):
    """Of "2.15.0a0+cu132" 2, 15, 0."""
    return tuple(map(int, re.findall(r"\d+", number)[:3]))


def main():
    versions = installed()
    if message := too_old(versions):
        sys.exit(f"set-up: {message}")
    if message := untried(versions):
        print(f"set-up: {message}")


if __name__ == "__main__":
    main()
