"""The harness: every case becomes a row, whatever became of those before it, over ranks too."""

import time
from contextlib import contextmanager

import pytest
import torch
from bench_setups import all_reduce, naps

from cs336_systems import parallel
from labbook.bench import Step, grid, measure

QUICK = {"device": "cpu", "warmup_steps": 1, "steps": 2}


def flat(batches):
    return [row for rows in batches for row in rows]


def statuses(batches):
    return [(row["size"], row.get("pass"), row["status"]) for row in flat(batches)]


def test_a_grid_has_every_combination_the_last_varying_fastest():
    cases = grid(dtype="float32", size=[1, 2], pass_=("forward", "backward"))
    points = [(case.size, case.pass_) for case in cases[:3]]
    assert points == [(1, "forward"), (1, "backward"), (2, "forward")]
    assert cases[0] == {"dtype": "float32", "size": 1, "pass": "forward"}
    with pytest.raises(AttributeError, match="num_rows"):
        cases[0].num_rows  # noqa: B018


def test_cases_that_differ_in_their_pass_share_one_set_up_and_get_a_row_each():
    made, switched_on = [], []

    @contextmanager
    def around(case):
        switched_on.append(case.size)
        yield
        switched_on.remove(case.size)

    def setup(case):
        made.append(case.size)
        assert switched_on == [case.size]
        backward = Step(time.sleep, prepare=lambda: 0.05, values=lambda: {"saved_mib": case.size})
        return {"forward": Step(lambda: time.sleep(0.001)), "backward": backward}

    rows = flat(
        measure(grid(size=[1, 2], pass_=["forward", "backward"]), setup, around=around, **QUICK)
    )
    assert switched_on == []
    assert made == [1, 2]
    told = [(row["pass"], row["steps"], row.get("saved_mib")) for row in rows[:2]]
    assert told == [("forward", 2, None), ("backward", 2, 1)]
    assert rows[0]["p50_ms"] < rows[1]["p50_ms"]
    assert "reason" not in rows[0] or rows[0]["reason"] == ""


def test_steps_beside_the_one_of_the_row_give_it_their_medians():
    passed, order = [], []

    def setup(case):
        slow = Step(passed.append, prepare=lambda: order.append("slow") or time.sleep(0.01) or 7)
        timed = Step(time.sleep, prepare=lambda: 0.02)
        failing = Step(lambda: torch.empty(1 << 60, device="cpu"))
        also = {"slow_ms": slow, "timed_ms": timed, "alone_ms": lambda: None, "large_ms": failing}
        return {"": Step(lambda: order.append("run"), also=also, values=lambda: {"total": 1})}

    (row,) = flat(measure(grid(size=1), setup, **QUICK))
    assert row["alone_ms"] < 10 < 20 <= row["timed_ms"]
    assert row["slow_ms"] < 10, "what prepares a step does not count"
    assert set(passed) == {7}
    assert order == sorted(order), "they are timed after it"
    assert (row["status"], row["total"], "large_ms" in row) == ("ok", 1, False)


@pytest.mark.parametrize(("where", "of_two"), [("set-up", "oom"), ("step", "ok")])
def test_out_of_memory_is_a_row_and_later_cases_run(where, of_two):
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def setup(case):
        if where == "set-up" and case.size == 2:
            fail()
        return {"forward": Step(fail if case.size == 2 else list), "backward": Step(list)}

    found = statuses(measure(grid(size=[1, 2, 3], pass_=["forward", "backward"]), setup, **QUICK))
    assert found[2:4] == [(2, "forward", "oom"), (2, "backward", of_two)]
    assert found[4:] == [(3, "forward", "ok"), (3, "backward", "ok")]


def test_other_errors_end_the_sweep_unless_they_are_named():
    def setup(case):
        raise RuntimeError("no kernel takes this")

    with pytest.raises(RuntimeError, match="no kernel"):
        list(measure(grid(size=[1]), setup, **QUICK))
    (rows,) = measure(grid(size=[1]), setup, errors=RuntimeError, **QUICK)
    assert rows[0]["status"] == "error"
    assert "no kernel takes this" in rows[0]["reason"]


def test_a_pass_faster_than_its_part_is_timed_again_of_the_same_set_up():
    made, naps_s = [], iter([0.02, 0.001, 0.001, 0.02])

    def setup(case):
        made.append(case.size)
        return {case.pass_: nap, "forward_backward": nap}

    nap = Step(lambda: time.sleep(next(naps_s)))
    cases = grid(size=1, pass_=["forward", "forward_backward"])
    part, whole = flat(measure(cases, setup, device="cpu", warmup_steps=0, steps=1))
    assert (made, part["p50_ms"] < whole["p50_ms"]) == ([1], True)


def test_what_cannot_run_is_skipped_with_its_reason_and_what_is_on_record_is_left_out():
    how = {
        "skip": lambda case: "too large" if case.size == 2 else "",
        "kept": lambda case: case.size == 1,
    }
    found = list(measure(grid(size=[1, 2, 3]), lambda case: {"": Step(list)}, **how, **QUICK))
    assert statuses(found) == [(2, None, "skipped"), (3, None, "ok")]
    assert found[0][0]["reason"] == "too large"


def ranks(*sizes):
    cases = grid(num_rows=list(sizes), world_size=2, backend="gloo", pass_="forward")
    return list(measure(cases, all_reduce, stream=parallel.stream, warmup_steps=0, steps=2))


def test_if_one_rank_runs_out_of_memory_the_others_learn_it_and_later_cases_run():
    start = time.monotonic()
    rows = flat(ranks(1, 2, 4))
    assert [(row["num_rows"], row["status"]) for row in rows] == [(1, "ok"), (2, "oom"), (4, "ok")]
    assert rows[0]["total"] is True
    assert time.monotonic() - start < 60  # not the collective's time-out


def test_a_bug_of_one_rank_is_told_with_its_rank():
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 raised KeyError: 'a bug of rank 1'"):
        ranks(1, 3)


def test_the_slowest_rank_counts_a_call_has_its_share_of_a_step_and_a_row_ends_in_its_time():
    cases = grid(limit_s=[60.0, 1e-6], world_size=2, backend="gloo")
    how = {"stream": parallel.stream, "warmup_steps": 1, "steps": 3}
    whole, limited = flat(measure(cases, naps, **how))
    assert 20 <= whole["p20_ms"] <= whole["p80_ms"] < 50
    assert (whole["steps"], limited["steps"]) == (3, 1)
    assert 20 <= whole["nap_ms"] < 50
