"""Ranks in network namespaces of their own, over a link of a given rate."""

import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from cs336_systems import parallel
from cs336_systems.other_notebooks import taken_from
from cs336_systems.parallel import WorkerContext, hosts


def timed(context, rates_gbps):
    """Of an all-reduce of 4 MiB at each rate; and its sum."""
    found = []
    for rate in rates_gbps:
        parallel.slow_link(context, rate)
        message = torch.ones(2**20)
        dist.all_reduce(message)
        started = time.perf_counter()
        dist.all_reduce(message)
        found.append((time.perf_counter() - started, message[-1].item()))
    return found


@pytest.mark.skipif(bool(parallel.why_no_slow_link()), reason=parallel.why_no_slow_link())
def test_a_slow_link_is_as_slow_as_asked():
    """Of two ranks each sends as many bytes as the message has; of three a third more."""
    for ranks, passes in ((2, 1), (3, 4 / 3)):
        for rank in parallel.launch(timed, ranks, (0.04, 0.01), backend="gloo"):
            for (took_s, total), rate in zip(rank, (0.04, 0.01), strict=True):
                least_s = passes * (2**22 - 2**18) / (1e9 * rate)  # a burst is free
                assert total == ranks**2
                assert least_s < took_s < 5 * least_s


@pytest.mark.skipif(bool(parallel.why_no_slow_link()), reason=parallel.why_no_slow_link())
def test_a_host_that_died_takes_part_again_from_the_newest_checkpoint():
    """By torchrun's rendezvous; the notes are what notebook 44 makes its rows of."""
    fail, recovery_row = (
        taken_from("44_fsdp_accounting", name) for name in ("fail", "recovery_row")
    )
    failed_s, notes = fail("killed", keep_alive_s=1, timeout_s=60)
    before, after = notes[notes["at_s"] <= failed_s], notes[notes["at_s"] > failed_s]
    saved = before.loc[before["event"] == "saved", "step"].max()
    assert set(after.loc[after["event"] == "step", "rank"]) == {0, 1}
    assert after.loc[after["event"] == "step", "step"].min() == saved + 1 > 10
    row = recovery_row(failed_s, notes)
    assert 0 < row["noticed_s"] < 30  # no collective had to run out of time
    assert 3 < row["restarted_s"] < row["resumed_s"] < row["caught_up_s"]


@pytest.mark.skipif(bool(parallel.why_no_slow_link()), reason=parallel.why_no_slow_link())
def test_nothing_of_two_hosts_is_left():
    with parallel.two_hosts() as (first, second):
        call = f"import socket; socket.create_connection(('{first.address}', 9), 1)"

        def answer() -> str:
            done = second.run(sys.executable, "-c", call, stderr=subprocess.PIPE, text=True)
            return done.communicate()[1].splitlines()[-1]

        assert "refused" in answer()  # by the other host: nobody listens there
        asleep = first.run("sleep", "60")
        second.crash()
        assert asleep.poll() is None
        second.cable(up=False)
        assert "refused" not in answer()
    assert asleep.wait(timeout=5) == -signal.SIGKILL


def test_what_cannot_be_is_refused(monkeypatch):
    context = WorkerContext(0, 2, 0, torch.device("cpu"), "gloo", print)
    for bad in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="a rate above 0"):
            parallel.slow_link(context, bad)
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(RuntimeError, match=r"no tc \(Linux has"):
        parallel.slow_link(context, 0.1)
    monkeypatch.setattr(hosts.shutil, "which", str)
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="needs root"):
        parallel.slow_link(context, 0.1)


def test_a_paced_layer_waits_and_has_a_gradient():
    layer = parallel.PacedLayer(0.5, 0.02)
    x = torch.ones(3, requires_grad=True)
    started = time.perf_counter()
    y = layer(x)
    forward_s = time.perf_counter() - started
    y.sum().backward()
    assert forward_s >= 0.02
    assert time.perf_counter() - started >= 0.06
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones(3))
    assert torch.equal(layer.weight.grad, torch.zeros(2**17))
