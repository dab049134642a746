"""Variants of the kernels: every change still fits the shipped source, and says so when it does not."""

import pytest

from cs336_systems.attention import variants
from cs336_systems.attention.techniques import KNOWN, STEPS, all_rungs, rungs
from cs336_systems.attention.variants import BACKWARD, FORWARD, Change

pytest.importorskip("triton")
RUNGS = [rung for kernel in STEPS for rung in rungs(kernel)]


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: f"{rung.kernel}: {rung.name}")
def test_every_change_fits_the_kernels(rung):
    kernels = variants.kernels(rung.changes)
    assert set(kernels) == {"forward", "dq", "dkdv"}
    for change in rung.changes:
        assert change.old != change.new


@pytest.mark.parametrize("rung", rungs("backward"), ids=lambda rung: rung.name)
def test_d_is_computed_once(rung):
    changes = tuple(change for change in rung.changes if change.file == BACKWARD)
    assert ("delta = tl.sum(" in variants.changed_source(BACKWARD, changes)) == rung.own_delta


def test_a_change_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="is 0 times in kernels_forward; allowed: 1 times"):
        variants.kernels((Change(FORWARD, "no such text", ""),))


@pytest.mark.parametrize("kernel", STEPS)
def test_the_climb_ends_at_the_shipped_source(kernel):
    kept = [step for step in STEPS[kernel] if step.kept]
    climbed = rungs(kernel)[: len(kept) + 1]
    assert climbed[0].changes
    assert not climbed[-1].changes
    assert climbed[-1].copy_engine
    names = [rung.name for rung in all_rungs(kernel)]
    assert len(set(names)) == len(names)
    assert len(names) == len(STEPS[kernel]) + 2


@pytest.mark.parametrize("kernel", STEPS)
def test_predictions_are_ranges(kernel):
    assert all(0.5 < step.gain[0] <= step.gain[1] < 3 for step in STEPS[kernel])


def test_every_rung_but_the_first_is_one_of_ten_techniques():
    named = {place for _, places in KNOWN for place in places}
    there = {(kernel, rung.name) for kernel in STEPS for rung in all_rungs(kernel)[1:]}
    assert len(KNOWN) == 10
    assert named <= there
    assert {name for _, name in there - named} == {"skip what is masked"}
