"""check_ddp passes what is right, and names each classic mistake."""

import subprocess
import sys

import broken_ddp
import cloudpickle
import launch_workers
import pytest

from cs336_systems.checks.ddp_checks import check_ddp
from cs336_systems.parallel import launch

SENTENCES = {
    "ForgetsToBroadcast": "rank 1: after wrapping, the parameter 'frozen' is not that of rank 0. Broadcast",
    "ForgetsBuffers": "rank 1: after wrapping, the buffer 'shift' is not that of rank 0",
    "ReducesTheParameter": "rank 0: finish_gradient_synchronization() changed the parameter itself",
    "ForgetsToAverage": "rank 0: the gradient of 'first.weight' is the sum over the ranks. Divide",
    "ForgetsToWait": "rank 0: finish_gradient_synchronization() left 8 of 8 all-reduces",
    "ForgetsTheLastHandle": "rank 0: finish_gradient_synchronization() left 1 of 8 all-reduces",
    "NeverCommunicates": "rank 0: the gradient of 'first.weight' is still this rank's own. All-reduce it",
    "ReducesACopy": "rank 0: the gradient of 'first.weight' is still this rank's own. All-reduce",
    "ForgetsTheLastParameter": "rank 0: the gradient of 'rarely.bias' is still this rank's own",
    "UnfreezesEverything": "rank 0: the frozen parameter 'frozen' was given a gradient",
    "HidesTheModule": "rank 0: `.module` is not the module that was wrapped",
}


@pytest.fixture(scope="module")
def failures():
    """All wrong classes in one launch: nothing that one leaves behind may disturb the next."""
    cloudpickle.register_pickle_by_value(broken_ddp)  # as if defined in a notebook
    classes = {name: cloudpickle.dumps(getattr(broken_ddp, name)) for name in SENTENCES}
    cloudpickle.unregister_pickle_by_value(broken_ddp)
    return launch(launch_workers.check_each, 2, classes, backend="gloo", timeout_s=60)[0]


@pytest.mark.parametrize("name", SENTENCES)
def test_each_mistake_is_named(failures, name):
    assert failures[name][0].startswith(SENTENCES[name])


def test_a_class_of_the_caller_passes(capsys):
    class MyDDP(broken_ddp.Right):
        """Defined here, so no worker could import it."""

    check_ddp(MyDDP)
    assert capsys.readouterr().out == "MyDDP: 4 cases right on 2 ranks\n"


def test_a_wrong_class_of_a_script_is_named():
    """As in a notebook: the class lives in __main__."""
    script = """
from torch import nn
from cs336_systems.checks.ddp_checks import check_ddp
class Nothing(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
check_ddp(Nothing)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "AssertionError: Nothing, rank 1: after wrapping, the parameter" in run.stderr


def test_a_crash_is_told():
    with pytest.raises(
        AssertionError, match=r"Crashes did not get through: rank . of 2 raised KeyError: 'oh'"
    ):
        check_ddp(broken_ddp.Crashes)


def test_the_thorough_cases_ask_for_more():
    with pytest.raises(AssertionError, match=r"Right, rank 0: .* has no no_sync\(\) context"):
        check_ddp(broken_ddp.Right, world_size=1, thorough=True)
