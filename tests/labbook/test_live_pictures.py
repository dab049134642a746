"""A picture of values that a page computes goes to this machine's folder: nothing committed changes."""

import json
import shutil

import pytest

from labbook.project import project


@pytest.mark.usefixtures("measured_cards")
@pytest.mark.parametrize(
    ("slug", "change"),
    [
        ("mixed_precision_accumulation", "drift['error'] *= 1.5"),
        ("flash_forward", "exact = exact + 1"),
    ],
)
def test_other_live_values_change_nothing_committed(slug, change, tmp_path, monkeypatch):
    """The cells of a notebook up to its first picture, in a copy of the project, with other values drawn."""
    source = project()
    (notebook,) = source.notebooks.glob(f"*_{slug}.ipynb")
    ignore = shutil.ignore_patterns("*.ipynb")
    shutil.copytree(source.notebooks, tmp_path / "notebooks", ignore=ignore)
    shutil.copy(notebook, tmp_path / "notebooks")
    reference = tmp_path / "figures" / source.reference
    shutil.copytree(source.figures / source.reference / slug, reference / slug)
    shutil.copy(source.figures / source.reference / "machine.json", reference)
    monkeypatch.delenv("LABBOOK_FIGURES")
    monkeypatch.setenv("LABBOOK_PROJECT", str(tmp_path))
    committed = contents(reference)
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    draws = next(place for place, text in enumerate(sources) if "page.figure(" in text)
    names = {}
    for text in sources[:draws] + [change, sources[draws]]:
        exec(text, names)
    assert contents(reference) == committed
    assert list((tmp_path / "figures" / names["page"].card.slug / slug).glob("*.png"))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
