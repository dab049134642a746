"""Run one worker function from a shell: under torchrun, on all of its nodes, or on this machine alone.

    torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$THIS_NODE --master-addr=$FIRST_NODE -m \\
        cs336_systems.parallel cs336_systems.bench.collectives_bench:time_collectives --arguments '{"steps": 5}'
    python -m cs336_systems.parallel cs336_systems.bench.collectives_bench:time_collectives --workers 2

Rank 0's result is printed as JSON, or written to --output.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cs336_systems.parallel.launch import launch
from cs336_systems.parallel.worker import BACKENDS, find_worker, join


def main() -> None:
    options = _parser().parse_args()
    if "RANK" in os.environ:  # torchrun started this process and its peers
        context = join(options.backend, timeout_s=options.timeout_s)
        result = options.worker(context, **options.arguments)
        dist.destroy_process_group()
        if context.rank == 0:
            _deliver(result, options.output)
    else:
        results = launch(
            options.worker,
            options.workers,
            backend=options.backend,
            timeout_s=options.timeout_s,
            **options.arguments,
        )
        _deliver(results[0], options.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cs336_systems.parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("worker", type=_worker, help="package.module:function")
    parser.add_argument(
        "--arguments", type=_arguments, default={}, help="its keyword arguments, a JSON object"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes on this machine, without torchrun")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--output", type=Path, help="file for rank 0's result")
    return parser


def _worker(address: str) -> Any:
    try:
        return find_worker(address)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object like {{"steps": 5}}')
    return arguments


def _deliver(result: Any, output: Path | None) -> None:
    text = json.dumps(result, indent=1)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()
