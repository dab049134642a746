"""What no closed form or fit can be asked is told in a sentence."""

import pytest

from cs336_systems import accounting
from cs336_systems.configs import model_size

TINY = model_size("tiny")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: accounting.forward_flops(TINY, 0, 16), "batch_size.*0"),
        (lambda: accounting.activation_bytes(TINY, 1, 8, "fp8"), "fp8.*tf32"),
        (lambda: accounting.peak_bytes(TINY, 1, 8, "sideways"), "sideways.*train_step"),
        (
            lambda: accounting.peak_phases(TINY, 1, 8, "backward", schedule=((0, 1, 2),)),
            "3 blocks.*2",
        ),
        (lambda: accounting.bus_factor("reduce", 2), "all_reduce"),
        (lambda: accounting.fit_alpha_beta([1, 1], [1, 2]), "two sizes or more"),
        (lambda: accounting.fit_alpha_beta([1, 2], [1, 0]), "times above 0"),
        (lambda: accounting.fit_alpha_beta([1, 2], [1, float("nan")]), "times above 0"),
    ],
)
def test_bad_input_is_told_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
