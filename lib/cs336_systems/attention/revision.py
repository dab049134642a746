"""Since when the kernels are what they are: rows of ours from before were measured with others."""

import ast
import hashlib
from pathlib import Path

# By dtype: what was made for one left the others as they were.
SINCE = {
    "bfloat16": "2026-11-21T19:04:00Z",
    "float16": "2026-11-21T19:04:00Z",
    "tf32": "2026-11-21T19:25:00Z",
    "float32": "2026-11-21T19:25:00Z",
}
# What was made last.
CHANGE = (
    "a 16-bit forward of Hopper's own, a backward there whose addresses stay in registers, exact float32 by "
    "pointers, with tiles that spill nothing, and less work for the host at every launch"
)
SOURCES = (
    "kernels_forward.py",
    "kernels_backward.py",
    "kernels_hopper_forward.py",
    "kernels_hopper.py",
    "dq_sums.py",
    "tuning.py",
)
# Of the code in SOURCES. A test compares the two, so that whoever changes the kernels writes a new date, too.
DIGEST = "246ad4a61b77f1be"


def digest() -> str:
    """A few digits that change with the code in SOURCES, and not with comments and docstrings."""
    code = [_without_docstrings(Path(__file__).with_name(name).read_text()) for name in SOURCES]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def _without_docstrings(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
    return ast.unparse(tree)


def is_earlier(implementation: str, dtype: str, measured_at: str) -> bool:
    """Whether a row is of our Triton kernels, as they were before their last change."""
    return implementation == "flash_triton" and measured_at < SINCE[dtype]
