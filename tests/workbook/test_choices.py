"""The words written out for parameters are those that the library knows, and no notebook lacks its own."""

import pytest

from cs336_systems.attention import IMPLEMENTATIONS as ATTENTION
from cs336_systems.attention.config import KERNELS
from cs336_systems.bench import (
    attention_bench as attention,
)
from cs336_systems.bench import (
    eligibility as verdicts,
)
from cs336_systems.bench import (
    model_bench as training,
)
from cs336_systems.bench import (
    profile_bench as profiling,
)
from cs336_systems.bench.collectives_bench import COLLECTIVES
from cs336_systems.bench.ddp_bench import WRAPPERS
from cs336_systems.bench.drift_bench import OPTIMIZERS
from cs336_systems.parallel.worker import BACKENDS
from cs336_systems.training.checkpointing import STRATEGIES
from cs336_systems.workbook import batch
from cs336_systems.workbook.choices import EVERYWHERE, IMPLEMENTATIONS, choices
from cs336_systems.workbook.parameters import parameter_errors

NOTEBOOKS = batch.load_notebooks()
CHECKED_OTHERWISE = {"model_size", "reference"}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("source", ("auto", *profiling.SOURCES)),
        ("attention", ("auto", *ATTENTION)),
        ("backend", BACKENDS),
        ("collective", COLLECTIVES),
        ("optimizer", OPTIMIZERS),
        ("tile_kernel", KERNELS),
        ("strategy", ("every N", *STRATEGIES)),
    ],
)
def test_words_are_the_librarys(name, known):
    assert set(EVERYWHERE[name]) == set(known)


@pytest.mark.parametrize(
    ("slug", "known"),
    [
        ("pytorch_attention", attention.IMPLEMENTATIONS),
        ("torch_compile", training.IMPLEMENTATIONS),
        ("flash_benchmarking", verdicts.IMPLEMENTATIONS),
        ("naive_ddp", WRAPPERS),
    ],
)
def test_implementations_are_the_librarys(slug, known):
    assert set(IMPLEMENTATIONS[slug]) == set(known)


def test_implementations_of_the_weighted_sum_are_the_librarys():
    pytest.importorskip("triton")
    from cs336_systems.bench import weighted_sum_bench as weighted_sum

    assert set(IMPLEMENTATIONS["weighted_sum"]) == set(weighted_sum.IMPLEMENTATIONS)


def texts():
    """Every parameter that is text or a list of texts, and is no size and no machine."""
    for notebook, known in NOTEBOOKS.items():
        for name, parameter in known.items():
            items = parameter.default if isinstance(parameter.default, list) else [parameter.default]
            if isinstance(items[0], str) and name not in CHECKED_OTHERWISE:
                yield notebook, name


@pytest.mark.parametrize(("notebook", "name"), list(texts()))
def test_a_wrong_word_is_refused_in_every_notebook(notebook, name):
    """Where this fails, the parameter's words are missing in notebook/choices.py."""
    known = NOTEBOOKS[notebook]
    wrong = ["no such word"] if isinstance(known[name].default, list) else "no such word"
    (error,) = parameter_errors(known, {name: wrong}, notebook.partition("_")[2])
    assert error.startswith(f"{name} has 'no such word'; allowed: ")


def test_defaults_are_never_refused():
    for notebook, known in NOTEBOOKS.items():
        defaults = {name: parameter.default for name, parameter in known.items()}
        assert parameter_errors(known, defaults, notebook.partition("_")[2]) == []


def test_what_is_free_has_no_words():
    assert choices("benchmarking_script", "model_size") is None
    assert choices("benchmarking_script", "implementation") is None
