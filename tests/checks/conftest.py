"""What the tests of the checkers share."""

import cloudpickle
import pytest
from each_class import check_each

from cs336_systems.parallel import launch


@pytest.fixture(scope="module")
def failures(request):
    """What the CASES say about each class of BROKEN that SENTENCES names, all of them in one launch.

    So nothing that one leaves behind may disturb the next.
    """
    broken = request.module.BROKEN
    cloudpickle.register_pickle_by_value(broken)  # as if defined in a notebook
    classes = {name: cloudpickle.dumps(getattr(broken, name)) for name in request.module.SENTENCES}
    cloudpickle.unregister_pickle_by_value(broken)
    return launch(check_each, 2, classes, request.module.CASES, backend="gloo", timeout_s=200)[0]
