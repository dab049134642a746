"""How columns, values and numbers are written, ordered and coloured."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from labbook.labels import (
    column_label,
    named_value,
    ordered,
    significant,
    value_label,
)
from labbook.style import VERMILLION, palette


def test_values_without_a_fixed_colour_get_one_that_is_free_and_sizes_darken():
    assert palette(["mine", "compiled"], "implementation")["compiled"] == VERMILLION
    assert len(set(palette(["eager", "compiled", "mine", "yours"], "implementation").values())) == 4
    assert len(palette([f"case {i}" for i in range(30)], "strategy")) == 30
    for values, column in (
        (range(7), "d_head"),
        (["small", "medium", "large", "xl"], "model_size"),
    ):
        lightness = [sum(to_rgb(color)) for color in palette(values, column).values()]
        assert np.all(np.diff(lightness) < 0)


@given(st.floats(1e-6, 1e9))
def test_significant_digits_stay_close_and_plain(value):
    text = significant(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.0051)


def test_significant_digits_of_what_is_large_or_nothing():
    texts = ["10.0", "1,000", "4,417", "16,500"]
    assert [significant(n) for n in (9.996, 999.6, 4417.4, 16504.01)] == texts
    assert value_label(None) == significant(float("nan")) == "–"


def test_values_are_in_the_order_a_reader_expects():
    assert ordered(["2.7B", "small", "xl", "tiny"], "model_size") == ["tiny", "small", "xl", "2.7B"]
    assert ordered(["PyTorch's DDP", "naive"], "wrapper") == ["naive", "PyTorch's DDP"]
    assert ordered(["mine", "sdpa", "plain"], "implementation") == ["plain", "sdpa", "mine"]
    assert ordered(pd.Series([1024, 128, 1024]), "context_length") == [128, 1024]


def test_a_column_has_its_unit_where_its_name_ends_in_one():
    names = ["tail_ms", "of_ours", "ms"]
    assert [column_label(name) for name in names] == ["tail (ms)", "of ours", "ms"]


def test_a_value_that_stands_alone_says_what_it_is():
    contexts = [named_value("context_length", n) for n in (128, 2048, 65536, 1000, 1536)]
    assert contexts == [f"context {text}" for text in ("128", "2K", "64K", "1000", "1536")]
    assert named_value("bucket_size_mb", 25.0) == "bucket size 25 MiB"
    assert named_value("implementation", "sdpa") == "SDPA"
    assert [named_value("is_causal", flag) for flag in (True, np.False_)] == [
        "causal",
        "not causal",
    ]
