"""Which kernels a time was measured with: a digest of their sources."""

import ast
import hashlib
from functools import cache
from pathlib import Path

SOURCES = (
    "triton_forward", "triton_backward", "hopper_forward", "hopper_backward",
    "dq_accum", "float32_planes", "config",
)  # fmt: skip


@cache
def kernel_digest() -> str:
    """16 digits that change with the code of our attention kernels and their tiles, not with its comments."""
    code = [_code(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")) for name in SOURCES]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)
