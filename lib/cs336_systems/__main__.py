"""python -m cs336_systems: the workbook's commands, which are labbook's."""

import sys

import cs336_systems  # noqa: F401  chooses Triton's interpreter, before a module of torch's imports triton
from labbook.book.commands import main

if __name__ == "__main__":
    sys.exit(main(program="python -m cs336_systems"))
