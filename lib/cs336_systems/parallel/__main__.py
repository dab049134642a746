"""Run one worker function under torchrun, on one machine or on several.

    torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$THIS_NODE --master-addr=$FIRST_NODE -m \\
        cs336_systems.parallel your_module:worker --arguments '{"steps": 5}'

What rank 0 sends is printed as it comes, and then what it returns, each as a line of JSON; values that JSON
lacks are there as Python shows them, and all of a value with a key that is a tuple, or that holds itself.
"""

import argparse
import json
import os
import pkgutil

import torch.distributed as dist

from cs336_systems.parallel.launch import BACKENDS, join


def _send(value):
    """Print a value as a line of JSON."""
    try:
        line = json.dumps(value, default=repr)
    except (TypeError, ValueError):
        line = json.dumps(repr(value))
    # What comes later may fail.
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser("torchrun ... -m cs336_systems.parallel")
    parser.add_argument("worker", help="package.module:function", type=pkgutil.resolve_name)
    parser.add_argument("--arguments", default={}, type=json.loads, help="keywords, a JSON object")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("there is no RANK in the environment: start it with torchrun")

    context = join(options.backend, _send, timeout_s=600)
    result = options.worker(context, **options.arguments)
    if result is not None:
        context.send(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
