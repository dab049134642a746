"""Are the tests any good? Plants bugs in a copy of the repository, one at a time: does a test fail?

    python -m tests.planted                        a few bugs in each module that has tests; takes long
    python -m tests.planted lib/labbook/compare.py --bugs 30     more of them in one

A bug is a comparison turned round, another operator, a number that is one larger, or a statement left out.
Not each changes what the code does (a limit, a message): those that survive are for a person to look at.

Exit code 1: the tests fail without any bug, or fewer than --caught of 100 are caught.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
# The tests of a module are those named like it; of these, others.
OTHERS = {
    "lib/cs336_systems/functional.py": "tests/test_functional.py tests/test_model.py",
    "lib/cs336_systems/accounting/flops.py": "tests/accounting/test_accounting.py",
    "lib/cs336_systems/attention/layouts.py": "tests/attention/test_choose.py tests/attention/test_flash.py",
    "lib/cs336_systems/kernels/rms_norm.py": "tests/kernels/test_row_kernels.py",
    "lib/labbook/book/execution.py": "tests/labbook/book/test_batch.py",
    **{f"lib/cs336_systems/attention/{name}.py": "tests/attention/test_kernels.py"
       for name in ("launcher", "triton_backward", "triton_forward")},
}  # fmt: skip
TURNED = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or,
    ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}  # fmt: skip


def bugs(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """All that can be planted in a node: what is in it, and what could stand there instead."""
    for field, value in ast.iter_fields(node):
        if field in (
            "annotation",
            "returns",
            "decorator_list",
            "exc",
        ):  # these change nothing, or a message
            continue
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, ast.AST):
                if (new := _planted(inner)) is not None:
                    yield inner, ast.unparse(new)
                yield from bugs(inner)


def _planted(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in TURNED:
            return ast.Compare(left, [TURNED[type(op)]()], [right])
        case ast.BinOp(left, op, right) if type(op) in TURNED:
            return ast.BinOp(left, TURNED[type(op)](), right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(TURNED[type(op)](), values)
        case ast.IfExp(test, body, orelse):
            return ast.IfExp(test, orelse, body)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            return ast.Constant(value + 1)
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise():
            return ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            return ast.Pass()
    return None


def tests_of(module: str) -> list[str]:
    _, package, *folders, file = Path(module).parts
    like_it = "/".join(["tests", *[package] * (package == "labbook"), *folders, f"test_{file}"])
    return OTHERS.get(module, like_it).split()


def planted(source: str, node: ast.AST, new: str) -> str:
    """The source with the bug in it; all else stays as it stands."""
    lines = source.encode().splitlines(keepends=True)  # columns of a syntax tree count bytes
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + (new if isinstance(node, ast.stmt) else f"({new})").encode() + after).decode()


def failing(copy: Path, tests: list[str]) -> str:
    """The last line of pytest if a test fails; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"] + list(tests)
    # Byte code would outlive a bug: it is told from its source by the second and the size.
    own = {"PYTHONPATH": str(copy / "lib"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command,
            cwd=copy,
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"nothing for {TIMEOUT_S} s"
    return (run.stdout.strip() or "no output").splitlines()[-1] if run.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted", description=__doc__.splitlines()[0]
    )
    parser.add_argument("modules", nargs="*", metavar="FILE", help="under lib (those with tests)")
    parser.add_argument("--bugs", type=int, default=4, metavar="N", help="in each module, at most")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another one, other bugs")
    parser.add_argument(
        "--caught", type=int, default=70, metavar="N", help="of 100, or the exit code is 1"
    )
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", "learn", "__pycache__")
        shutil.copytree(REPOSITORY, copy, ignore=ignored, symlinks=True)
        every = sorted(str(path.relative_to(copy)) for path in copy.glob("lib/*/**/*.py"))
        every = [
            module for module in every if all((copy / test).exists() for test in tests_of(module))
        ]
        for module in options.modules or every:
            tests = tests_of(module)
            if failed := failing(copy, tests):
                print(f"{module}: without any bug: {failed}")
                return 1
            source = (copy / module).read_text(encoding="utf-8")
            all_bugs = list(bugs(ast.parse(source)))
            for node, new in random.Random(options.seed).sample(
                all_bugs, min(options.bugs, len(all_bugs))
            ):
                (copy / module).write_text(planted(source, node, new), encoding="utf-8")
                outcomes.append("caught" if failing(copy, tests) else "survived")
                old = " ".join(ast.get_source_segment(source, node).split())
                print(f"{outcomes[-1]:9} {module}:{node.lineno}: {old} -> {new}", flush=True)
            (copy / module).write_text(source, encoding="utf-8")
    caught = outcomes.count("caught")
    print(f"\n{caught} of {len(outcomes)} bugs caught")
    return int(100 * caught < options.caught * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
