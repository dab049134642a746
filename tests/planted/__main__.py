"""Are the tests any good? Plants bugs in a copy of the repository, one at a time: does a test fail?

    python -m tests.planted                        a few bugs in each module that has tests; takes long
    python -m tests.planted lib/labbook/compare.py --bugs 30     more of them in one

A bug is a comparison turned round, another operator, a number that is one larger, or a statement left out.
Not each changes what the code does (a limit, a message): those that survive are for a person to look at.

Exit code 1: the tests fail without any bug, or fewer than 70 of 100 are caught.
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
# Names in `ast`, each beside what may stand there instead.
TURNED = """
    Lt GtE, LtE Gt, Gt LtE, GtE Lt, Eq NotEq, NotEq Eq, In NotIn, NotIn In, Is IsNot, IsNot Is,
    And Or, Or And, Add Sub, Sub Add, Mult Add, Div Mult, FloorDiv Mult
"""
TURNED = dict(pair.split() for pair in TURNED.split(","))
UNTOUCHED = ("annotation", "returns", "decorator_list", "exc")  # change nothing, or a message


def bugs(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """All that can be planted in a node: what is in it, and what could stand there instead."""
    for field, value in ast.iter_fields(node):
        if field in UNTOUCHED:
            continue
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, ast.AST):
                if (new := _planted(inner)) is not None:
                    yield inner, ast.unparse(new)
                yield from bugs(inner)


def _planted(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Compare(left, [op], [right]) if new := _turned(op):
            return ast.Compare(left, [new], [right])
        case ast.BinOp(left, op, right) if new := _turned(op):
            return ast.BinOp(left, new, right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(_turned(op), values)
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


def _turned(op: ast.AST) -> ast.AST | None:
    name = TURNED.get(type(op).__name__)
    return getattr(ast, name)() if name else None


def test_of(module: str) -> str:
    """lib/cs336_systems/attention/choose.py -> tests/attention/test_choose.py."""
    name = module.removeprefix("lib/").removeprefix("cs336_systems/")
    folder, _, file = name.rpartition("/")
    return f"tests/{folder}/test_{file}"


def planted(source: str, node: ast.AST, new: str) -> str:
    """The source with the bug in it; all else stays as it stands."""
    lines = source.encode().splitlines(keepends=True)  # columns of a syntax tree count bytes
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + (new if isinstance(node, ast.stmt) else f"({new})").encode() + after).decode()


def failing(copy: Path, test: str) -> str:
    """The last line of pytest if a test fails; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    # Byte code would outlive a bug: it is told from its source by the second and the size.
    own = {"PYTHONPATH": str(copy / "lib"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    options = {"cwd": copy, "env": os.environ | own, "timeout": TIMEOUT_S}
    try:
        run = subprocess.run(command, capture_output=True, text=True, **options)
    except subprocess.TimeoutExpired:
        return f"nothing for {TIMEOUT_S} s"
    return (run.stdout.strip() or "no output").splitlines()[-1] if run.returncode else ""


def main() -> int:
    description = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=description)
    parser.add_argument("modules", nargs="*", metavar="FILE", help="under lib (those with tests)")
    parser.add_argument("--bugs", type=int, default=4, metavar="N", help="in each module, at most")
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", "learn", "__pycache__")
        shutil.copytree(REPOSITORY, copy, ignore=ignored, symlinks=True)
        every = sorted(str(path.relative_to(copy)) for path in copy.glob("lib/*/**/*.py"))
        for module in options.modules or every:
            test = test_of(module)
            if not (copy / test).exists():
                if not options.modules:
                    continue
                test = str(Path(test).parent)  # all of its room
            if failed := failing(copy, test):
                print(f"{module}: without any bug: {failed}")
                return 1
            source = (copy / module).read_text(encoding="utf-8")
            found = list(bugs(ast.parse(source)))
            for node, new in random.Random(0).sample(found, min(options.bugs, len(found))):
                (copy / module).write_text(planted(source, node, new), encoding="utf-8")
                outcomes.append("caught" if failing(copy, test) else "survived")
                old = " ".join(ast.get_source_segment(source, node).split())
                print(f"{outcomes[-1]:9} {module}:{node.lineno}: {old} -> {new}", flush=True)
            (copy / module).write_text(source, encoding="utf-8")
    caught = outcomes.count("caught")
    print(f"\n{caught} of {len(outcomes)} bugs caught")
    return int(caught < 0.7 * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
