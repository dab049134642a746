"""What the tests of the checkers share."""

import cloudpickle
import pytest
from each_candidate import try_each

from cs336_systems.parallel import launch


@pytest.fixture(scope="module")
def failures(request):
    """What the module's PROPERTIES say about each candidate of its BUGS, all of them in one launch.

    So nothing that one leaves behind may disturb the next.
    """
    module = request.module
    cloudpickle.register_pickle_by_value(module)  # as if defined in a notebook
    pickled = {name: cloudpickle.dumps((wrong, module.PROPERTIES)) for name, wrong in module.BUGS.items()}
    cloudpickle.unregister_pickle_by_value(module)
    return launch(try_each, 2, pickled, backend="gloo", timeout_s=200)[0]
