"""The harness: every case becomes a row, whatever became of those before it, over ranks too."""

import time
from contextlib import contextmanager
from itertools import chain

import pytest
import torch
from bench_setups import all_reduce, naps

from cs336_systems import parallel
from labbook.bench import Step, grid, measure
from labbook.timing import MIB, Timing


def flat(batches):
    return list(chain.from_iterable(batches))


def statuses(rows):
    """Size, pass and status of each row."""
    return [(row["size"], row.get("pass"), row["status"]) for row in rows]


def in_process(cases, setup, **options):
    """The rows of cases, timed at once."""
    options = {"device": "cpu", "warmup_steps": 1, "steps": 2} | options
    return flat(measure(cases, setup, **options))


def test_a_grid_has_every_combination_the_last_varying_fastest():
    cases = grid(dtype="float32", size=[1, 2], pass_=("forward", "backward"))
    points = [(case.size, case.pass_) for case in cases[:3]]
    assert points == [(1, "forward"), (1, "backward"), (2, "forward")]
    with pytest.raises(AttributeError, match="num_rows"):
        cases[0].num_rows  # noqa: B018


def test_cases_that_differ_in_their_pass_share_one_set_up_and_get_a_row_each():
    set_up = []
    switched_on = []

    @contextmanager
    def around(case):
        switched_on.append(case.size)
        yield
        switched_on.remove(case.size)

    def setup(case):
        set_up.append(case.size)
        assert switched_on == [case.size]
        saved = {"saved_mib": case.size}
        backward = Step(time.sleep, prepare=lambda: 0.05, values=lambda: saved)
        return {"forward": Step(list), "backward": backward}

    rows = in_process(grid(size=[1, 2], pass_=["forward", "backward"]), setup, around=around)
    assert switched_on == []
    assert set_up == [1, 2]
    forward, backward = rows[:2]
    assert backward.items() >= {"pass": "backward", "saved_mib": 1, "steps": 2}.items()
    assert "saved_mib" not in forward
    assert forward["p50_ms"] < backward["p50_ms"]


def test_steps_beside_the_one_of_the_row_give_it_their_medians():
    order = []

    def setup(case):
        slow = Step(time.sleep, prepare=lambda: order.append("slow") or 0.02)
        failing = Step(lambda: torch.empty(1 << 60, device="cpu"))
        also = {"slow_ms": slow, "alone_ms": lambda: None, "large_ms": failing}
        return {"": Step(lambda: order.append("run"), also=also, values=lambda: {"total": 1})}

    (row,) = in_process(grid(size=1), setup)
    assert row["alone_ms"] < 10 < 20 <= row["slow_ms"]
    assert order == sorted(order), "they are timed after it"
    assert row["status"] == "ok"
    assert row["total"] == 1
    assert "large_ms" not in row


@pytest.mark.parametrize(("where", "of_two"), [("set-up", "oom"), ("step", "ok")])
def test_out_of_memory_is_a_row_and_later_cases_run(where, of_two):
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def setup(case):
        if where == "set-up" and case.size == 2:
            fail()
        return {"forward": Step(fail if case.size == 2 else list), "backward": Step(list)}

    cases = grid(size=[1, 2, 3], pass_=["forward", "backward"])
    _, _, *later = statuses(in_process(cases, setup))
    assert later[:2] == [(2, "forward", "oom"), (2, "backward", of_two)]
    assert later[2:] == [(3, "forward", "ok"), (3, "backward", "ok")]


def test_other_errors_end_the_sweep_unless_they_are_named():
    def setup(case):
        raise RuntimeError("no kernel takes this")

    with pytest.raises(RuntimeError, match="no kernel"):
        in_process(grid(size=1), setup)
    (row,) = in_process(grid(size=1), setup, errors=RuntimeError)
    assert row["status"] == "error"
    assert "no kernel takes this" in row["reason"]


def test_what_a_learner_has_not_written_yet_is_no_row():
    def stub():
        raise NotImplementedError()

    with pytest.raises(NotImplementedError):
        in_process(grid(size=1), lambda case: {"": Step(stub)}, errors=Exception)


def test_what_cannot_run_is_skipped_with_its_reason():
    def skip(case):
        return "too large" if case.size == 2 else ""

    rows = in_process(
        grid(size=[2, 3]),
        lambda case: {"": Step(list)},
        skip=skip,
    )
    assert statuses(rows) == [(2, None, "skipped"), (3, None, "ok")]
    assert rows[0]["reason"] == "too large"


def test_a_peak_below_what_the_set_up_keeps_is_an_error_and_no_row(monkeypatch):
    timed = Timing((1.0,), peak_memory_mib=2.0)
    monkeypatch.setattr(Step, "timed", lambda *arguments, **counts: timed)
    steps = {"right": Step(list, least_bytes=2 * MIB), "wrong": Step(list, least_bytes=3 * MIB)}
    (row,) = in_process(grid(pass_="right"), lambda case: steps)
    assert row["peak_memory_mib"] == 2
    with pytest.raises(ValueError, match=r"'wrong'.* 2\.0 MiB.* keeps 3\.0 MiB"):
        in_process(grid(pass_="wrong"), lambda case: steps)


def ranks(*sizes):
    """The rows of all-reduces over two processes."""
    cases = grid(num_rows=list(sizes), world_size=2, backend="gloo", pass_="forward")
    return flat(measure(cases, all_reduce, stream=parallel.stream, warmup_steps=0, steps=2))


def test_if_one_rank_runs_out_of_memory_the_others_learn_it_and_later_cases_run():
    start = time.monotonic()
    rows = ranks(1, 2, 4)
    assert [row["num_rows"] for row in rows] == [1, 2, 4]
    assert [row["status"] for row in rows] == ["ok", "oom", "ok"]
    assert rows[0]["total"] is True
    assert time.monotonic() - start < 60  # not the collective's time-out


def test_the_slowest_rank_counts_a_call_has_its_share_of_a_step_and_a_row_ends_in_its_time():
    cases = grid(limit_s=[60.0, 1e-6], world_size=2, backend="gloo")
    whole, limited = flat(measure(cases, naps, stream=parallel.stream, warmup_steps=1, steps=3))
    assert 20 <= whole["p20_ms"] <= whole["p80_ms"] < 50
    assert whole["steps"] == 3
    assert limited["steps"] == 1
    assert 20 <= whole["nap_ms"] < 50
