"""A picture of values that a page computes goes to this machine's folder: nothing committed changes."""

import pytest

from labbook.code import code_cells, notebook_of


@pytest.mark.usefixtures("measured_cards")
@pytest.mark.parametrize("slug", ["mixed_precision_accumulation", "flash_forward"])
def test_live_values_change_nothing_committed(slug, figures):
    """The cells of a notebook up to its first picture."""
    sources, _ = code_cells(notebook_of(slug))
    draws = next(place for place, text in enumerate(sources) if "page.figure(" in text)
    names = {}
    for text in sources[: draws + 1]:
        exec(text, names)
    (picture,) = figures.rglob("*.png")
    assert picture.parents[1] == figures / names["page"].card.slug
