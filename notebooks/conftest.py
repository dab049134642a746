"""What `pytest --nbval` leaves out on this machine, and why; and where the notebooks' rows go meanwhile."""

import tempfile
from pathlib import Path

import pytest

from labbook.book.notebooks import why_not_here

_REASONS = {path.name: why_not_here(path.stem) for path in Path(__file__).parent.glob("*.ipynb")}
_SCRATCH = tempfile.TemporaryDirectory(prefix="cs336-figures-")
collect_ignore = [name for name, reason in _REASONS.items() if reason]


def pytest_report_header() -> list[str]:
    return [f"skipped: {name} {_REASONS[name]}" for name in sorted(collect_ignore)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> object:
    """Outputs are compared with the committed ones, so a kernel starts without rows of one's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABBOOK_FIGURES", _SCRATCH.name)
        return (yield)
