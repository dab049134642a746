"""What Nsight Systems' own process runs: python -m labbook.profiles.program FILE, a pickled program."""

import pickle
import sys
from pathlib import Path

import torch


def main(path: str) -> None:
    """Warm up; then say when the measured steps begin and end, between which nsys records."""
    measured = pickle.loads(Path(path).read_bytes())()
    with torch.cuda.profiler.profile():
        measured()


if __name__ == "__main__":
    main(sys.argv[1])
