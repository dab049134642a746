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
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
# An operator, and what stands there instead, by their names in `ast`.
OTHER_OPERATORS = """
    Lt GtE, LtE Gt, Gt LtE, GtE Lt, Eq NotEq, NotEq Eq, In NotIn, NotIn In, Is IsNot, IsNot Is,
    And Or, Or And, Add Sub, Sub Add, Mult Add, Div Mult, FloorDiv Mult
"""
UNTOUCHED = ("annotation", "returns", "decorator_list", "exc")  # change nothing, or a message


def bugs(node):
    """All that can be planted in a node, in pairs: what is in it, and what could stand there instead."""
    for child in _children(node):
        bug = _bug(child)
        if bug is not None:
            yield child, ast.unparse(bug)
        yield from bugs(child)


def _children(node):
    for field, value in ast.iter_fields(node):
        if field not in UNTOUCHED:
            values = value if isinstance(value, list) else [value]
            yield from (child for child in values if isinstance(child, ast.AST))


def _bug(node):
    """What could stand instead of a node; None where nothing is known."""
    match node:
        case ast.Compare(left, [op], [right]) if other := _other(op):
            return ast.Compare(left, [other], [right])
        case ast.BinOp(left, op, right) if other := _other(op):
            return ast.BinOp(left, other, right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(_other(op), values)
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


def _other(op):
    others = dict(pair.split() for pair in OTHER_OPERATORS.split(","))
    name = others.get(type(op).__name__)
    return getattr(ast, name)() if name else None


def test_of(module: str) -> str:
    """lib/cs336_systems/attention/choose.py -> tests/attention/test_choose.py."""
    name = module.removeprefix("lib/").removeprefix("cs336_systems/")
    folder, _, file = name.rpartition("/")
    return f"tests/{folder}/test_{file}"


def planted(source: str, node: ast.AST, bug: str) -> str:
    """The source with the bug in it; all else stays as it stands."""
    lines = source.encode().splitlines(keepends=True)  # columns of a syntax tree count bytes
    first = node.lineno - 1
    last = node.end_lineno - 1
    before = b"".join(lines[:first]) + lines[first][: node.col_offset]
    after = lines[last][node.end_col_offset :] + b"".join(lines[last + 1 :])
    text = bug if isinstance(node, ast.stmt) else f"({bug})"
    return (before + text.encode() + after).decode()


def failure(copy: Path, test: str) -> str:
    """The last line of pytest if a test fails; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    # Byte code would outlive a bug: it is told from its source by the second and the size.
    own = {"PYTHONPATH": str(copy / "lib"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    options = {"cwd": copy, "env": os.environ | own, "timeout": TIMEOUT_S}
    try:
        run = subprocess.run(command, capture_output=True, text=True, **options)
    except subprocess.TimeoutExpired:
        return f"nothing for {TIMEOUT_S} s"
    if run.returncode == 0:
        return ""
    return (run.stdout.strip() or "no output").splitlines()[-1]


def caught(copy: Path, module: str, test: str, most: int) -> list[bool]:
    """Of so many bugs in a module, at most, whether the test catches them; each is printed."""
    source = (copy / module).read_text(encoding="utf-8")
    found = list(bugs(ast.parse(source)))
    outcomes = []
    for node, bug in random.Random(0).sample(found, min(most, len(found))):
        (copy / module).write_text(planted(source, node, bug), encoding="utf-8")
        outcomes.append(failure(copy, test) != "")
        old = " ".join(ast.get_source_segment(source, node).split())
        outcome = "caught" if outcomes[-1] else "survived"
        print(f"{outcome:9} {module}:{node.lineno}: {old} -> {bug}", flush=True)
    (copy / module).write_text(source, encoding="utf-8")
    return outcomes


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
        tested = [module for module in every if (copy / test_of(module)).exists()]
        for module in options.modules or tested:
            test = test_of(module)
            if module not in tested:
                test = str(Path(test).parent)  # all of its room
            if message := failure(copy, test):
                print(f"{module}: without any bug: {message}")
                return 1
            outcomes += caught(copy, module, test, options.bugs)
    print(f"\n{sum(outcomes)} of {len(outcomes)} bugs caught")
    return int(sum(outcomes) < 0.7 * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
