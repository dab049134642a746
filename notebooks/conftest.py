"""What `pytest --nbval` leaves out on this machine, and why."""

from pathlib import Path

from cs336_systems.workbook.problems import why_not_here

_REASONS = {path.name: why_not_here(path.stem) for path in Path(__file__).parent.glob("*.ipynb")}
collect_ignore = [name for name, reason in _REASONS.items() if reason]


def pytest_report_header() -> list[str]:
    return [f"skipped: {name} {_REASONS[name]}" for name in sorted(collect_ignore)]
