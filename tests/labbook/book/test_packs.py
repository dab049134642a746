"""Rows of other people's machines: what is packed is added whole, and what does not fit is said."""

import json
import zipfile

import pytest

from labbook.book import commands
from labbook.files import REPOSITORY_FIGURES

TABLE = "weighted_sum/weighted_sum_times.csv"


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """Packs the rows of the committed h100 as another machine's: pack(change), of its files by name."""
    names = [
        path
        for pattern in ("machine.json", "runs/*", "*/*.csv")
        for path in (REPOSITORY_FIGURES / "h100").glob(pattern)
    ]
    files = {str(path.relative_to(REPOSITORY_FIGURES / "h100")): path.read_text() for path in names}
    files["machine.json"] = json.dumps(json.loads(files["machine.json"]) | {"slug": "theirs"})
    monkeypatch.setenv("LABBOOK_FIGURES", str(tmp_path / "figures"))
    monkeypatch.chdir(tmp_path)

    def write(changed=None, machine="theirs"):
        with zipfile.ZipFile(tmp_path / "theirs.zip", "w") as file:
            for name, text in (files | (changed or {})).items():
                if text is not None:
                    file.writestr(f"{machine}/{name}", text)
        return files

    return write


def test_what_is_added_can_be_packed_and_is_the_same(pack, tmp_path, capsys):
    files = pack()
    assert commands.main(["rows", "add", "theirs.zip"]) == 0
    (tmp_path / "figures" / "theirs" / "notes.txt").write_text("mine")
    (tmp_path / "theirs.zip").unlink()
    assert commands.main(["rows", "pack", "theirs"]) == 0
    with zipfile.ZipFile(tmp_path / "theirs.zip") as file:
        assert {name.removeprefix("theirs/"): file.read(name).decode() for name in file.namelist()} == files
    assert commands.main(["rows", "add", "theirs.zip"]) == 0
    assert "theirs.zip" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"weighted_sum/no_such.csv": "a\n1\n"},
            "weighted_sum/no_such.csv: unknown table 'no_such'; allowed: ",
        ),
        ({"no_such/weighted_sum_times.csv": "a\n1\n"}, "there is no notebook of 'no_such'"),
        ({TABLE: lambda text: text.replace("d_model", "width", 1)}, "line 1: the columns are"),
        ({TABLE: lambda text: text.replace(",ok,", ",fine,", 1)}, "status is 'fine'"),
        ({TABLE: lambda text: text.replace("20261125", "20001231", 1)}, "runs are missing: 20001231"),
        ({"machine.json": None}, "no machine card for 'theirs'"),
        ({"script.sh": "rm"}, "theirs.zip holds other things than machine.json"),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_is_added(pack, tmp_path, capsys, changed, said):
    files = pack()
    pack({name: value(files[name]) if callable(value) else value for name, value in changed.items()})
    assert commands.main(["rows", "add", "theirs.zip"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()


def test_a_machine_of_the_same_name_is_not_overwritten(pack, tmp_path, capsys):
    pack()
    assert commands.main(["rows", "add", "theirs.zip"]) == 0
    pack({"machine.json": json.dumps({"slug": "theirs"})})
    assert commands.main(["rows", "add", "theirs.zip"]) == 2
    pack({"machine.json": (tmp_path / "figures/theirs/machine.json").read_text().replace("H100", "H900")})
    assert commands.main(["rows", "add", "theirs.zip"]) == 2
    assert "there is another theirs here" in capsys.readouterr().err
    (tmp_path / "theirs.zip").write_text("no zip")
    assert commands.main(["rows", "add", "theirs.zip"]) == 2
    assert commands.main(["rows", "pack", "nobody"]) == 2
    assert "theirs.zip is no pack of rows" in capsys.readouterr().err
