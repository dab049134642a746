"""Rows of other people's machines: what does not fit is said."""

import json
import shutil

import pytest

from labbook.book import commands
from labbook.files import REPOSITORY_FIGURES

TABLE = "weighted_sum/weighted_sum_times.csv"


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """The rows of the committed h100, unpacked as another machine's."""
    folder = tmp_path / "figures" / "theirs"
    shutil.copytree(REPOSITORY_FIGURES / "h100", folder, ignore=shutil.ignore_patterns("*.png", "*.svg"))
    card = json.loads((folder / "machine.json").read_text())
    (folder / "machine.json").write_text(json.dumps(card | {"slug": "theirs"}))
    monkeypatch.setenv("LABBOOK_FIGURES", str(folder.parent))
    return folder


def test_rows_that_fit_are_counted(theirs, capsys):
    assert commands.main(["rows", "theirs"]) == 0
    assert capsys.readouterr().out.startswith(f"theirs: {len(list(theirs.glob('*/*.csv')))} tables")


WRONG = [
    ("weighted_sum/no_such.csv", lambda _: "a\n1\n", "no_such.csv: unknown table 'no_such'; allowed: "),
    ("no_such/weighted_sum_times.csv", lambda _: "a\n1\n", "there is no notebook of 'no_such'"),
    (TABLE, lambda text: text.replace("d_model", "width", 1), "line 1: the columns are"),
    (TABLE, lambda text: text.replace(",ok,", ",fine,", 1), "status is 'fine'"),
    (TABLE, lambda text: text.replace("20261125", "20001231", 1), "runs are missing: 20001231"),
    ("machine.json", lambda _: "{", "theirs/machine.json is damaged"),
]


@pytest.mark.parametrize(("name", "change", "said"), WRONG)
def test_what_does_not_fit_is_said(theirs, capsys, name, change, said):
    path = theirs / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(change(path.read_text() if path.exists() else ""))
    assert commands.main(["rows", "theirs"]) == 2
    assert said in capsys.readouterr().err
    assert commands.main(["rows", "nobody"]) == 2
    assert "nobody has no rows" in capsys.readouterr().err
