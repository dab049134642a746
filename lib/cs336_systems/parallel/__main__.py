"""Run one worker function from a shell: under torchrun, on all of its nodes, or on this machine alone.

    torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$THIS_NODE --master-addr=$FIRST_NODE -m \\
        cs336_systems.parallel cs336_systems.bench.collectives_bench:time_collectives --arguments '{"steps": 5}'
    python -m cs336_systems.parallel cs336_systems.bench.collectives_bench:time_collectives --workers 2

What rank 0 sends, or else what it returns, is printed as JSON, or written to --output.
"""  # noqa: E501

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from cs336_systems.parallel.launch import stream
from cs336_systems.parallel.worker import BACKENDS, find_worker, join


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m cs336_systems.parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("worker", help="package.module:function")
    parser.add_argument("--arguments", default="{}", help="its keyword arguments, a JSON object")
    parser.add_argument("--workers", type=int, default=2, help="processes on this machine, without torchrun")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--output", type=Path, help="file for what rank 0 sends or returns")
    options = parser.parse_args()
    try:
        worker, arguments = find_worker(options.worker), json.loads(options.arguments)
    except ValueError as error:
        parser.error(f"{error}; given: {options.worker} --arguments {options.arguments}")
    if not isinstance(arguments, dict):
        parser.error(f'--arguments {options.arguments} is not a JSON object like {{"steps": 5}}')
    how = {"backend": options.backend, "timeout_s": options.timeout_s}
    sent = []
    if "RANK" in os.environ:  # torchrun started this process and its peers
        context = join(**how)
        result = worker(replace(context, send=sent.append), **arguments)
        dist.destroy_process_group()
        if context.rank > 0:
            return
    else:
        result = _collect(stream(worker, options.workers, **how, **arguments), sent)
    text = json.dumps(sent or result, indent=1)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n")


def _collect(stream, sent):
    """Keep what is sent, and return rank 0's result."""
    while True:
        try:
            sent.append(next(stream))
        except StopIteration as end:
            return end.value[0]


if __name__ == "__main__":
    main()
