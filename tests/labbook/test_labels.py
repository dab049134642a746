import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labbook.labels import (
    column_label,
    context_label,
    machine_label,
    named_value,
    ordered,
    significant,
    value_label,
)
from labbook.schema import COLUMNS


def test_columns_carry_their_unit():
    for name, column in COLUMNS.items():
        assert not column.unit or column_label(name).endswith(f"({column.unit})")
    assert column_label("extra_memory_gib") == "extra memory (GiB)"
    assert column_label("model_size") == "model size"


def test_contexts_are_written_in_powers_of_two():
    texts = [context_label(n) for n in (128, 512, 1024, 16384, 65536, 1000, 1536)]
    assert texts == ["128", "512", "1K", "16K", "64K", "1000", "1536"]


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
    assert ordered(["PyTorch's DDP", "one process"], "wrapper") == ["one process", "PyTorch's DDP"]
    assert ordered(["mine", "sdpa", "plain"], "implementation") == ["plain", "sdpa", "mine"]
    assert ordered(pd.Series([1024, 128, 1024]), "context_length") == [128, 1024]
    assert ordered(["b", "a", "b"], "strategy") == ["b", "a"]


def test_a_value_that_stands_alone_says_what_it_is():
    assert named_value("context_length", 2048) == "context 2K"
    assert named_value("bucket_size_mb", 25.0) == "bucket size 25 MB"
    assert named_value("implementation", "sdpa") == "SDPA"
    assert [named_value("is_causal", flag) for flag in (True, np.False_)] == ["causal", "not causal"]
    assert machine_label("reference: H200") == "H200 (reference)"
