"""Plants each bug of tests/planted/bugs.py in a copy of the repository: does one of its tests fail?

    python -m tests.planted                     all of them, some minutes to an hour
    python -m tests.planted rows kernels        those whose file, or what they break, has one of the words
    python -m tests.planted --jobs 4            in four copies at once

Exit code 1: a bug survives, its text is not found exactly once, or the tests fail without any bug.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.planted.bugs import BUGS, Bug

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1200


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="of its file or of what it breaks (all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies of the repository at once")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if any(word in bug.file + bug.what for word in options.words or [""])]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(copy_repository(Path(folder) / str(number)))

        def outcome_in_a_copy(bug: Bug) -> str:
            copy = copies.get()
            try:
                return outcome(bug, copy)
            finally:
                copies.put(copy)

        sound = copies.get()
        if failed := failing(sound, sorted({test for bug in bugs for test in bug.tests.split()})):
            print(f"without any bug: {failed}")
            return 1
        copies.put(sound)
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = []
            for bug, (result, seconds) in zip(bugs, pool.map(timed(outcome_in_a_copy), bugs), strict=True):
                outcomes.append(result)
                print(f"{result:9} {seconds:6.1f} s  {bug.file}: {bug.what}", flush=True)
    caught = outcomes.count("caught")
    print(f"\n{caught} of {len(bugs)} bugs caught")
    return int(caught < len(bugs))


def timed(function):
    def call(argument):
        start = time.monotonic()
        return function(argument), time.monotonic() - start

    return call


def copy_repository(target: Path) -> Path:
    """What git keeps or would keep, as it is now."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0"):
        if name and (source := REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)
    return target


def outcome(bug: Bug, copy: Path) -> str:
    """ "caught", "survived", or "stale": its text is not there, or more than once."""
    path = copy / "lib" / "cs336_systems" / bug.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(bug.old) != 1:
        return "stale"
    path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    try:
        return "caught" if failing(copy, bug.tests.split()) else "survived"
    finally:
        path.write_text(text, encoding="utf-8")


def failing(copy: Path, tests: list[str]) -> str:
    """The last line of pytest if a test fails; empty if all pass."""
    paths = [f"tests/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths]
    # Byte code would outlive a bug: it is told from its source by the second and the size.
    own = {"PYTHONPATH": str(copy / "lib"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command, cwd=copy, env=os.environ | own, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"nothing for {TIMEOUT_S} s"
    if run.returncode not in (0, 1):  # no test ran, so none failed
        raise RuntimeError(f"pytest {' '.join(tests)}\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return run.stdout.strip().splitlines()[-1] if run.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
