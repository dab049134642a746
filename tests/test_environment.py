"""pyproject.toml, environment.yml, the pins and the imports of the library describe one environment."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from cs336_systems import versions

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
# conda's triton is for Linux only and environment.yml knows no conditions: pip installs it as pyproject says.
PIP_ONLY = {"triton"}
# Run or looked into, not imported: JupyterLab, the MathJax of pages, Sphinx, pytest's plugins, the linter.
NOT_IMPORTED = {
    "furo",
    "ipykernel",
    "jupyter-server-mathjax",
    "jupyterlab",
    "myst-nb",
    "nbval",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "sphinx",
}


def required(*groups):
    listed = [entry for group in groups for entry in group]
    return {canonicalize_name(r.name): r for r in map(Requirement, listed)}


LIBRARY = required(PROJECT["dependencies"])
EXTRAS = PROJECT["optional-dependencies"]
ALL = required(PROJECT["dependencies"], EXTRAS["dev"], EXTRAS["site"])


def pins():
    lines = (REPOSITORY / "lib" / "pins.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): r.specifier for r in found}


def imported(folder):
    """The distributions that the files of a folder import."""
    names = set()
    for path in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
    modules = {name.split(".")[0] for name in names}
    local = {path.stem for path in (REPOSITORY / folder).rglob("*")} | {"cs336_systems", "tests"}
    known = packages_distributions() | {"triton": ["triton"]}
    return {canonicalize_name(known[name][0]) for name in modules - local - sys.stdlib_module_names}


def test_what_the_library_and_its_tests_import_is_declared_and_nothing_else():
    library, tests = imported("lib"), imported("tests")
    assert library - LIBRARY.keys() == set()
    assert tests - ALL.keys() == set()
    assert LIBRARY.keys() - library - NOT_IMPORTED == set()
    assert ALL.keys() - library - tests - NOT_IMPORTED == set()


def test_conda_asks_for_what_pyproject_asks_for():
    wanted = {
        {"torch": "pytorch"}.get(n, n): each.specifier
        for n, each in ALL.items()
        if n not in PIP_ONLY
    }
    listed = [Requirement(entry) for entry in CONDA["dependencies"] if isinstance(entry, str)]
    beside = {"python": SpecifierSet(PROJECT["requires-python"])}
    beside |= dict.fromkeys(["pip", "make", "cxx-compiler"], SpecifierSet())
    assert {canonicalize_name(r.name): r.specifier for r in listed} == wanted | beside
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]
    assert CONDA["dependencies"][-1] == {"pip": ["-e ."]}


def test_every_requirement_is_pinned_within_its_range_and_to_no_build():
    for name, specifier in pins().items():
        (pin,) = specifier
        assert pin.operator == "==", name
        assert "+" not in pin.version, f"{name}: the build (CPU, CUDA) is chosen by lib/setup.sh"
        assert name not in ALL or ALL[name].specifier.contains(pin.version), name
    assert ALL.keys() <= pins().keys()


def test_what_was_tried_begins_at_the_bounds_and_holds_the_pins():
    for name, (oldest, _) in versions.TRIED.items():
        assert ALL[name].specifier == SpecifierSet(f">={oldest}")
        (pin,) = pins()[name]
        assert versions.too_old({name: pin.version}) == versions.untried({name: pin.version}) == ""


def test_older_versions_are_refused_and_newer_ones_named():
    tried = {"torch": "2.15.0+cu132", "triton": "3.9.0", "numpy": "2.5.5", "pandas": "3.1.1"}
    assert versions.too_old(tried) == versions.untried(tried) == ""
    old = versions.too_old(tried | {"torch": "2.10.0+cpu"})
    assert old.startswith("torch 2.10.0+cpu is too old, the workbook needs 2.11 or newer: make")
    newer = versions.untried(tried | {"torch": "2.16.0a0", "numpy": "3.0.0"})
    assert newer.endswith("torch 2.16.0a0 (tried up to 2.15), numpy 3.0.0 (tried up to 2.5)")


SET_UP = "Makefile lib/setup.sh lib/bounds.sh lib/pins.txt environment.yml pyproject.toml .ci/run"


@pytest.mark.parametrize("name", SET_UP.split())
def test_no_registry_is_named(name):
    text = (REPOSITORY / name).read_text()
    assert "://" not in text
    assert "index-url" not in text
