"""What a reader holds in the head: the tokens of a program, its code lines, its comments.

A token is a name, a number, a string or an operator; docstrings and comments are free, and so are lines.
An f-string is one token on every Python (from 3.12 on `tokenize` takes it apart). Programs in strings count.
"""

import ast
import io
import re
import textwrap
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

MOST_IN_STATEMENT = 60
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.ENCODING,
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_HAS_BODY = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Assert)
# Of a shell script, JavaScript or a cell with magics, roughly the same.
_COMMENT = re.compile(r"^\s*(#|//).*$", re.MULTILINE)
_WORD = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`]*`|[\w.]+|[=<>!&|+*-]+|[^\w\s]")


class Count(NamedTuple):
    """Of one file or of many: tokens, lines that have one, comments that have a line of their own."""

    tokens: int = 0
    lines: int = 0
    comments: int = 0

    @property
    def density(self) -> float:
        """Tokens a code line."""
        return self.tokens / max(self.lines, 1)


def total(counts: list[Count]) -> Count:
    """Of many files together."""
    return Count(*map(sum, zip(*counts, strict=True))) if counts else Count()


def count(text: str) -> Count:
    """Of a program; of what is no Python, words and signs."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return _count_words(text)
    python = _count_python(text, _docstring_lines(tree))
    programs = [count(program) for program in _programs(tree)]
    in_strings = sum(program.tokens for program in programs)
    return python._replace(tokens=python.tokens + in_strings)


def long_statements(text: str) -> list[int]:
    """Lines where a simple statement of more than 60 tokens begins; a table (RATES = ...) may be longer."""
    starts = [first for first, _ in _spans(text)]
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, _SIMPLE) and not _is_table(node)
        if bisect_right(starts, node.end_lineno) - bisect_left(starts, node.lineno)
        > MOST_IN_STATEMENT
    ]


def starred_displays(text: str) -> list[int]:
    """Lines of `[*a, *b]`, `(x, *xs)`, `{*a}` and `{**a}`; a star in calls and in targets is fine."""
    return [node.lineno for node in ast.walk(ast.parse(text)) if _is_starred_display(node)]


def _count_python(text: str, docstrings: set[int]) -> Count:
    spans = [(first, last) for first, last in _spans(text) if first not in docstrings]
    lines = {line for first, last in spans for line in range(first, last + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [
        token
        for token in tokens
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    ]
    return Count(len(spans), len(lines), len(comments))


def _spans(text: str) -> list[tuple[int, int]]:
    """First and last line of every token."""
    spans = []
    starts: list[int] = []  # of the f-strings that we are in
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        first = token.start[0]
        if kind.endswith("STRING_START"):
            starts.append(first)
        elif kind.endswith("STRING_END"):
            first = starts.pop()
        if not starts and token.type not in _LAYOUT:
            spans.append((first, token.end[0]))
    return spans


def _count_words(text: str) -> Count:
    code = _COMMENT.sub("", text)
    lines = [line for line in code.splitlines() if line.strip()]
    return Count(len(_WORD.findall(code)), len(lines), len(_COMMENT.findall(text)))


def _docstring_lines(tree: ast.Module) -> set[int]:
    owners = [node for node in ast.walk(tree) if isinstance(node, _HAS_BODY)]
    docstrings = [node.body[0] for node in owners if ast.get_docstring(node, clean=False)]
    return {n for node in docstrings for n in range(node.lineno, node.end_lineno + 1)}


def _programs(tree: ast.Module) -> Iterator[str]:
    """Strings of several lines that are programs, docstrings apart."""
    docstrings = _docstring_lines(tree)
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        text = _text(node)
        if text is None:
            pending.extend(ast.iter_child_nodes(node))
        elif node.lineno not in docstrings and _is_program(textwrap.dedent(text)):
            yield textwrap.dedent(text)


def _text(node: ast.AST) -> str | None:
    """Of a string; what an f-string inserts is a name."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "_" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_program(text: str) -> bool:
    """Whether its lines do anything: names and numbers alone, as in a CSV file, are parsed as well."""
    if "\n" not in text.strip():
        return False
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError):
        return False
    values = (ast.Name, ast.Constant, ast.Tuple, ast.BinOp, ast.Compare, ast.AnnAssign)
    return not all(isinstance(getattr(each, "value", each), values) for each in statements)


def _is_table(node: ast.AST) -> bool:
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return all(isinstance(target, ast.Name) and target.id.isupper() for target in targets)


def _is_starred_display(node: ast.AST) -> bool:
    if isinstance(node, ast.Dict):
        return None in node.keys
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return False
    is_target = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
    return not is_target and any(isinstance(element, ast.Starred) for element in node.elts)
