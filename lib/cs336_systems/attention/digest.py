"""Which kernels a time was measured with: a digest of their sources."""

import ast
import hashlib
from functools import cache
from pathlib import Path

SOURCES = (
    "triton_forward", "triton_backward", "hopper_forward", "hopper_backward", "hopper_backward_narrow",
    "dq_accum", "float32_planes", "config",
)  # fmt: skip
# Rewritten sources that compile to the same PTX, compared for every shipped tile with Triton 3.6 and 3.7: the
# digest of the sources that they replace, for its rows are of the same kernels.
SAME_CODE = {"0aa16b33d50fb75c": "246ad4a61b77f1be"}


@cache
def kernel_digest() -> str:
    """16 digits that change with our attention kernels and their tiles.

    They are taken from the sources; comments and docstrings do not count, nor do changes that compile to the
    same code (SAME_CODE).
    """
    digest = source_digest()
    return SAME_CODE.get(digest, digest)


def source_digest() -> str:
    """As `kernel_digest`, of the sources as they are."""
    code = [_code(Path(__file__).with_name(f"{name}.py").read_text()) for name in SOURCES]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)
