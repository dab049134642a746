"""check_ddp passes what is right, and names each classic mistake."""

import re
import subprocess
import sys

import broken_ddp
import pytest

from cs336_systems.checks.ddp_checks import cases, check_ddp
from cs336_systems.checks.steps import step

BROKEN, CASES = broken_ddp, cases(thorough=False, overlapped=True)
# What the sentence about each mistake must name.
SENTENCES = {
    "ForgetsToBroadcast": "rank 1: .* parameter 'frozen' .* Broadcast",
    "ForgetsBuffers": "rank 1: .* buffer 'shift' ",
    "ReducesTheParameter": "rank 0[, 1]*: .* changed the parameter itself",
    "ForgetsToAverage": "rank 0[, 1]*: .* 'first.weight' is the sum over the ranks. Divide",
    "WaitsInBackward": "rank 0[, 1]*: backward waits for each message. .* async_op=True",
    "SendsAfterBackward": "rank 0[, 1]*: 8 of 8 messages leave only in finish_gradient_synchronization",
    "ForgetsToWait": "rank 0[, 1]*: 8 of 8 all-reduces",
    "ForgetsTheLastHandle": "rank 0[, 1]*: 1 of 8 all-reduces",
    "ReducesACopy": "rank 0[, 1]*: .* 'first.weight' is still this rank's own. Average it",
    "ForgetsTheLastParameter": "rank 0[, 1]*: .* 'rarely.bias' is still this rank's own",
    "UnfreezesEverything": "rank 0[, 1]*: .* frozen parameter 'frozen' ",
    "HidesTheModule": "rank 0[, 1]*: `.module` ",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_each_mistake_is_named(failures, name):
    assert re.match(SENTENCES[name], failures[name][0])


def test_a_class_of_the_caller_passes(capsys):
    class MyDDP(broken_ddp.Right):
        """Defined here, so no worker could import it."""

    check_ddp(MyDDP)
    assert "MyDDP: 4 cases right" in capsys.readouterr().out


def test_a_wrong_class_of_a_script_is_named(tmp_path):
    """As in a notebook, the class lives in __main__; and the script guards nothing."""
    script = tmp_path / "script.py"
    script.write_text("""
from torch import nn
from cs336_systems.checks.ddp_checks import check_ddp
class Nothing(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
check_ddp(Nothing)
""")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert "AssertionError: Nothing, rank 1: after wrapping, the parameter" in run.stderr


def test_a_crash_is_told_and_the_thorough_cases_ask_for_more():
    with pytest.raises(AssertionError, match=r"Crashes .* raised KeyError: 'oh'"):
        check_ddp(broken_ddp.Crashes, world_size=1)
    with pytest.raises(AssertionError, match=r"Right, rank 0: .* no_sync"):
        check_ddp(broken_ddp.Right, world_size=1, thorough=True)


@pytest.mark.parametrize(
    ("wrong", "timeout_s", "named"),
    [("ReturnsNothing", 60, "return"), ("NeverEnds", 4, "not done within 4 s")],
)
def test_what_does_not_get_through_is_one_sentence(wrong, timeout_s, named, capsys):
    with step("step"):
        check_ddp(getattr(broken_ddp, wrong), timeout_s=timeout_s)
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("✗")]
    assert named in told
