"""The code that notebooks show is the code that runs."""

from cs336_systems.report.source import without_docstrings

SOURCE = '''
def area(r):
    """Docstring
    of two lines."""
    # A comment that stays.
    return 3 * r * r


class Shape:
    """Gone."""

    sides = "not a docstring"
'''


def test_docstrings_leave_and_everything_else_stays():
    shown = without_docstrings(SOURCE)
    assert "Docstring" not in shown
    assert "Gone" not in shown
    assert "# A comment that stays." in shown
    namespace = {}
    exec(shown, namespace)
    assert namespace["area"](2) == 12
    assert namespace["Shape"].sides == "not a docstring"
