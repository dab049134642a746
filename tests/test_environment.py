"""pyproject.toml, environment.yml and the pins describe one environment."""

import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
# conda's triton is for Linux only and environment.yml knows no conditions: pip installs it as pyproject says.
PIP_ONLY = {"triton"}
CONDA_NAMES = {"torch": "pytorch"}


def requirements():
    listed = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    return {canonicalize_name(r.name): r for r in map(Requirement, listed)}


def conda_requirements():
    found = [Requirement(entry) for entry in CONDA["dependencies"] if isinstance(entry, str)]
    return {canonicalize_name(r.name): r.specifier for r in found}


def pins():
    lines = (REPOSITORY / "lib" / "pins.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): r.specifier for r in found}


def test_conda_asks_for_what_pyproject_asks_for():
    wanted = {
        CONDA_NAMES.get(name, name): requirement.specifier
        for name, requirement in requirements().items()
        if name not in PIP_ONLY
    }
    python = {"python": SpecifierSet(PROJECT["requires-python"]), "pip": SpecifierSet()}
    assert conda_requirements() == wanted | python


def test_conda_takes_conda_forge_alone_and_the_package_itself_from_here():
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]
    assert CONDA["dependencies"][-1] == {"pip": ["-e ."]}


@pytest.mark.parametrize("name", requirements())
def test_every_requirement_is_pinned_within_its_range(name):
    (pin,) = pins()[name]
    assert pin.operator == "=="
    assert requirements()[name].specifier.contains(pin.version)


def test_every_pin_is_exact_and_belongs_to_no_build():
    for name, specifier in pins().items():
        (pin,) = specifier
        assert pin.operator == "==", name
        assert "+" not in pin.version, f"{name}: the build (CPU, CUDA) is chosen by lib/setup.sh"


SET_UP = ["Makefile", "lib/setup.sh", "lib/pins.txt", "environment.yml", "pyproject.toml", ".ci/run"]


@pytest.mark.parametrize("name", SET_UP)
def test_no_registry_is_named(name):
    text = (REPOSITORY / name).read_text()
    assert "://" not in text
    assert "index-url" not in text
