"""The registry of sizes against the handout's table."""

import pytest

from cs336_systems.configs import MODEL_SIZES, model_size

# (d_model, d_ff, layers, heads)
BOTH = {"small": (768, 3072, 12, 12), "medium": (1024, 4096, 24, 16), "large": (1280, 5120, 36, 20)}
HANDOUT = {
    2025: BOTH | {"xl": (1600, 6400, 48, 25), "2.7B": (2560, 10_240, 32, 32)},
    2026: BOTH | {"xl": (2560, 10_240, 32, 32), "10B": (4608, 12_288, 50, 36)},
}


@pytest.mark.parametrize("edition", HANDOUT)
def test_sizes_are_the_handouts(edition):
    sizes = {
        name: (size.d_model, size.d_ff, size.num_layers, size.num_heads)
        for name, size in MODEL_SIZES[edition].items()
        if name != "tiny"
    }
    assert sizes == HANDOUT[edition]
    assert all(size.vocab_size == 10_000 for name, size in MODEL_SIZES[edition].items() if name != "tiny")


def test_each_size_knows_its_key_and_has_even_heads():
    for edition, sizes in MODEL_SIZES.items():
        for name, size in sizes.items():
            assert size.label == f"{name} ({edition})"
            assert size.d_head * size.num_heads == size.d_model
            assert size.d_head % 2 == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("tiny", 2024), "2024.*2025, 2026"),
        (("tiny", "2025"), "'2025'.*2025, 2026"),
        (("huge",), "huge.*tiny.*2.7B"),
        (("10B", 2025), "10B.*2025.*edition 2026"),
        (("2.7B", 2026), "2.7B.*2026.*edition 2025"),
    ],
)
def test_refusals_name_what_is_allowed(arguments, match):
    with pytest.raises(ValueError, match=match):
        model_size(*arguments)
