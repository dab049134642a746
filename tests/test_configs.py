"""Sizes: complete, and refused by name."""

import pytest

from cs336_systems.configs import MODEL_SIZES, model_size


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
