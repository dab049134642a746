"""How columns, values and numbers are written, ordered and coloured."""

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from labbook import labels
from labbook.labels import (
    Vocabulary,
    column_label,
    named_value,
    ordered,
    significant,
    value_label,
    vocabulary,
)
from labbook.style import COLORS, VERMILLION, palette

FAMILIES = [
    (name, family) for name, families in vocabulary().families.items() for family in families
]
# Complete deuteranopia, protanopia and tritanopia on linear RGB (Machado, Oliveira & Fernandes 2009).
VISION = {
    "deuteranopia": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.01182 0.04294 0.968881",
    "protanopia": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "tritanopia": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.3039",
}


def seen(color, vision):
    """CIE Lab coordinates of a colour as seen with a colour vision deficiency."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    rgb = np.clip(np.reshape(VISION[vision].split(), (3, 3)).astype(float) @ linear, 0, 1)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ rgb / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
def test_colours_of_a_family_are_told_apart_by_every_eye(vision):
    for name, family in FAMILIES:
        colors = {value: COLORS[named.color] for value, named in family.items() if named.color}
        for one, other in itertools.combinations(colors, 2):
            distance = np.linalg.norm(seen(colors[one], vision) - seen(colors[other], vision))
            assert distance > 15, (
                f"{name}: {one} and {other} look alike with {vision}: {distance:.1f}"
            )


def test_values_without_a_fixed_colour_get_one_that_is_free_and_sizes_darken():
    assert palette(["mine", "compiled"], "implementation")["compiled"] == VERMILLION
    assert len(set(palette(["eager", "compiled", "mine", "yours"], "implementation").values())) == 4
    assert len(palette([f"case {i}" for i in range(30)], "strategy")) == 30
    for values, column in (
        (range(7), "d_head"),
        (["small", "medium", "large", "xl"], "model_size"),
    ):
        lightness = [seen(color, "tritanopia")[0] for color in palette(values, column).values()]
        assert np.all(np.diff(lightness) < -5)


def test_columns_carry_their_unit():
    found = [column_label(name) for name in ("extra_memory_gib", "rate_gbps", "model_size")]
    assert found == ["extra memory (GiB)", "rate (GB/s)", "model size"]


@given(st.floats(1e-6, 1e9))
def test_significant_digits_stay_close_and_plain(value):
    text = significant(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.0051)


def test_significant_digits_of_what_is_large_or_nothing():
    assert [significant(n) for n in (999.6, 4417.4, 16504.01)] == ["1,000", "4,417", "16,500"]
    assert [significant(n) for n in (0, -2.345)] == ["0", "-2.35"]
    assert value_label(None) == significant(float("nan")) == "–"


def test_values_are_in_the_order_a_reader_expects():
    assert ordered(["2.7B", "small", "xl", "tiny"], "model_size") == ["tiny", "small", "xl", "2.7B"]
    assert ordered(["train_step", "forward"], "pass") == ["forward", "train_step"]
    assert ordered(["PyTorch's DDP", "naive"], "wrapper") == ["naive", "PyTorch's DDP"]
    assert ordered(["mine", "sdpa", "plain"], "implementation") == ["plain", "sdpa", "mine"]
    assert ordered(pd.Series([1024, 128, 1024]), "context_length") == [128, 1024]
    assert ordered(["b", "a", "b"], "strategy") == ["b", "a"]


def test_a_value_that_stands_alone_says_what_it_is():
    contexts = [named_value("context_length", n) for n in (128, 2048, 65536, 1000, 1536)]
    assert contexts == [f"context {text}" for text in ("128", "2K", "64K", "1000", "1536")]
    assert named_value("bucket_size_mb", 25.0) == "bucket size 25 MiB"
    assert named_value("implementation", "sdpa") == "SDPA"
    assert [named_value("is_causal", flag) for flag in (True, np.False_)] == [
        "causal",
        "not causal",
    ]


def test_without_a_vocabulary_names_stand_for_themselves(monkeypatch):
    monkeypatch.setattr(labels, "vocabulary", Vocabulary)
    assert (column_label("p50_ms"), value_label("sdpa")) == ("p50 (ms)", "sdpa")
    assert ordered(["forward", "backward"], "pass") == ["forward", "backward"]
