"""What Nsight Systems runs: python -m labbook.profiles.program FILE, a pickled program and its cases."""

import json
import pickle
import sys
from functools import partial
from pathlib import Path

import torch

from labbook.timing import release_memory, run_or_out_of_memory


def main(path: str) -> None:
    """Run each case in a range of its own, out of memory or not; leave in FILE.json why it could not, or "".

    One process for all: it takes longer to start than most cases take. nsys records from the first to the
    last; what warms up is in no range.
    """
    program, cases = pickle.loads(Path(path).read_bytes())
    reasons = []
    with torch.cuda.profiler.profile():
        for number, case in enumerate(cases):
            run = partial(_run, program, case, range_of(number))
            reasons.append(run_or_out_of_memory(run, case.device)[1])
            release_memory(case.device)
    Path(f"{path}.json").write_text(json.dumps(reasons))


def range_of(number: int) -> str:
    """The name of a case's range."""
    return f"case {number}"


def _run(program, case, name):
    measured = program(case)
    with torch.cuda.nvtx.range(name):
        measured()


if __name__ == "__main__":
    main(sys.argv[1])
