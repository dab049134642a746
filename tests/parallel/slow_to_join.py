"""A worker whose last rank takes a while to join. Workers import it before they join."""

import os
import time

import torch.distributed as dist

_init, _joined = dist.init_process_group, []


def _slowly(*args, **kwargs):
    _init(*args, **kwargs)
    time.sleep(0.5 * int(os.environ["RANK"]))
    _joined.append(time.monotonic())


if "RANK" in os.environ:
    dist.init_process_group = _slowly


def times(context):
    """When this rank had joined, and when its work began."""
    return _joined[0], time.monotonic()
