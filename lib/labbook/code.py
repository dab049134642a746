"""What a measurement depends on: the cells that measure, and the measured rooms that they lead to.

Found by a static walk, so it costs no run. In a notebook it begins at the statements that save rows (a call
of `.measure`, `.save` or `save_rows`) and goes to the statements that bind the names they use, and so on;
in a module of a measured room (`measured` in book.yaml), at all its imports, wherever they stand. What is
imported from a package leads to all that its `__init__` imports. Other rooms are not followed: they check,
count or show. Of labbook there is the version of its timing. The values of parameters are not code.
"""

import ast
import dis
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

import psutil
from IPython.core.inputtransformer2 import TransformerManager

from labbook import timing
from labbook.project import project

TIMING = {"labbook.timing": timing.VERSION}  # its own part in a measurement
WHILE_RUNNING = "changed while running"
_SAVES = ("measure", "save", "save_rows")
_MUTATORS = re.compile("add|append|clear|extend|insert|pop|remove|setdefault|sort|update")
_DOTTED = re.compile(r"\b[a-z]\w*(?:\.\w+)+")
_LOOKS_UP = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_DOCUMENTED = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def of_notebook(path: Path) -> dict[str, str]:
    """The hashes of all that the rows of a notebook depend on: files, and its cells that save rows.

    Of a notebook that saves none: of all that it executes in the packages that have measured rooms.
    """
    sources, parameters = code_cells(path)
    rooms = project().measured
    if hashes := _behind(sources, parameters, range(len(sources)), rooms):
        return hashes | TIMING
    codes = [code for source in sources for code in statements(source)]
    files = _files(codes, [_first(room) for room in rooms])
    return dict(sorted(files.items())) | {"its cells": _digest(codes)}


def of_cells(sources: Sequence[str], parameters: Iterable[str] = ()) -> dict[str, str]:
    """The same of what the last of some executed cells saves. A file newer than this process is marked.

    sources: of the cells, in the order of their execution.
    parameters: the names whose literal values are no code.
    """
    last = range(len(sources) - 1, len(sources))
    hashes = _behind(tuple(sources), frozenset(parameters), last, project().measured)
    if not hashes:
        return {}
    started = psutil.Process().create_time()
    newer = [name for name in hashes if _written_at(name) > started]
    return hashes | TIMING | dict.fromkeys(newer, WHILE_RUNNING)


def _written_at(name: str) -> float:
    """When the file that a hash is of was written, "package/room/module.py"; 0 where it is of a cell."""
    package, _, rest = name.partition("/")
    return (_folder(package) / rest).stat().st_mtime if rest else 0


def notebook_of(slug: str) -> Path | None:
    """The notebook of a problem, if there is one."""
    return next(project().notebooks.glob(f"[0-9][0-9]_{slug}.ipynb"), None)


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The files and cells of `before` that are other ones now, gone, or not known to be those that ran."""
    return [
        name
        for name, digest in before.items()
        if now.get(name) != digest or digest == WHILE_RUNNING
    ]


def reason_changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What changed, in a line: "attention/launcher.py changed since"; "" if nothing did."""
    names = [re.sub(r"^[\w.]+/| #\w+$", "", name) for name in changed(before, now)]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} changed since" if names else ""


# A piece of code: its text, and the names in it.


def normalised(part: Any) -> str:
    """A part of a syntax tree as text: no docstring, no layout, and the same in every Python."""
    if isinstance(part, list):
        return f"[{', '.join(map(normalised, part))}]"
    if not isinstance(part, ast.AST):
        return ascii(part)
    fields = dict(ast.iter_fields(part))
    fields.pop("ctx", None)
    if isinstance(part, _DOCUMENTED) and ast.get_docstring(part) is not None:
        fields["body"] = part.body[1:]
    elif isinstance(part, ast.JoinedStr):
        fields["values"] = _joined(part.values)
    # Newer versions of Python have more fields, which are empty where an older one can parse the code.
    full = {name: value for name, value in fields.items() if value is not None and value != []}
    texts = [f"{name}={normalised(value)}" for name, value in full.items()]
    return f"{type(part).__name__}({', '.join(texts)})"


def _joined(values: Sequence[ast.expr]) -> list[ast.expr | str]:
    """The parts of an f-string; versions of Python cut its text differently."""
    parts: list[ast.expr | str] = [""]
    for value in values:
        if isinstance(value, ast.Constant):
            parts[-1] += value.value
        else:
            parts += [value, ""]
    return parts


@dataclass
class Code:
    """A module, or a statement of a notebook.

    imports: dotted names of modules, or of something in one; relative ones there are none.
    looks_up: names that must be bound before. binds: names bound. changes: names whose value may change.
    tables: of calls that save rows.
    """

    text: str
    imports: set[str] = field(default_factory=set)
    looks_up: set[str] = field(default_factory=set)
    binds: set[str] = field(default_factory=set)
    changes: set[str] = field(default_factory=set)
    tables: list[str] = field(default_factory=list)
    has_functions: bool = False


def read(*nodes: ast.stmt) -> Code:
    """Some statements as one piece of code. Raises SyntaxError: they are no module."""
    tree = ast.Module(list(nodes), type_ignores=[])
    code = Code(normalised(tree))
    for node in ast.walk(tree):
        _add_names(code, node)
    bytecode = compile(tree, "code", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    code.looks_up.update(_looked_up(bytecode, code.binds))
    return code


def _add_names(code: Code, node: ast.AST) -> None:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            code.has_functions = True
        case ast.Import(names):
            code.imports.update(each.name for each in names)
        case ast.ImportFrom(module, names):
            code.imports.update(f"{module}.{each.name}" for each in names)
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name), arguments) if name in _SAVES:
            texts = [str(each.value) for each in arguments if isinstance(each, ast.Constant)]
            code.tables += texts[:1] or ["rows"]
        case ast.Attribute(_, name, context) if _MUTATORS.fullmatch(name) or not _is_read(context):
            code.changes.add(_root(node))
        case ast.Subscript(ctx=context) if not _is_read(context):
            code.changes.add(_root(node))


def _is_read(context: ast.expr_context) -> bool:
    return isinstance(context, ast.Load)


def _root(node: ast.expr) -> str:
    """ "a" of a.b[c].d."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _looked_up(bytecode: CodeType, bound: set[str]) -> Iterator[str]:
    """The names that bytecode looks up before it binds them; those that it binds are added to `bound`."""
    for step in dis.get_instructions(bytecode):
        if isinstance(step.argval, CodeType):
            # A function or a class: what it binds is its own.
            yield from _looked_up(step.argval, set(bound))
        elif step.opname in _LOOKS_UP and step.argval not in bound:
            yield step.argval
        elif step.opname == "STORE_NAME":
            bound.add(step.argval)


def _first(chain: str) -> str:
    return chain.partition(".")[0]


def _digest(codes: Iterable[Code]) -> str:
    text = "".join(code.text for code in codes)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# Modules.


@cache
def _folder(package: str) -> Path | None:
    """Where a package is that this process would import."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


@cache
def _path(module: str) -> Path | None:
    """The file of a module."""
    package, *parts = module.split(".")
    folder = _folder(package)
    if folder is None:
        return None
    place = folder.joinpath(*parts)
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next(filter(Path.is_file, files), None)


@cache
def _module(path: Path, _: int) -> Code:
    """A module as it is since a time."""
    return read(*ast.parse(path.read_text(encoding="utf-8")).body)


def _files(codes: Iterable[Code], rooms: Iterable[str]) -> dict[str, str]:
    """The hash of each file of some rooms that code leads to."""
    files: dict[str, str] = {}
    waiting = [name for code in codes for name in code.imports]
    while waiting:
        name = waiting.pop()
        if not any(f"{name}.".startswith(f"{room}.") for room in rooms):
            continue
        # It is a module, or something in one.
        path = _path(name) or _path(name.rpartition(".")[0])
        file = str(path.relative_to(_folder(_first(name)).parent)) if path else ""
        if file and file not in files:
            code = _module(path, path.stat().st_mtime_ns)
            files[file] = _digest([code])
            waiting += code.imports
    return files


# Notebooks.


def code_cells(path: Path) -> tuple[tuple[str, ...], frozenset[str]]:
    """The sources of a notebook's code cells, and the names of its parameters."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    sources: list[str] = []
    parameters: set[str] = set()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            sources.append("".join(cell["source"]))
            if "parameters" in cell["metadata"].get("tags", ()):
                parameters.update(*(code.binds for code in statements(sources[-1])))
    return tuple(sources), frozenset(parameters)


@cache
def statements(source: str) -> list[Code]:
    """The statements of a cell, as IPython executes them; of %time and %%time those that they time.

    Of an import each name is a statement, for others of that line do not matter.
    """
    codes: list[Code] = []
    with suppress(SyntaxError):
        for node in ast.parse(TransformerManager().transform_cell(source)).body:
            if isinstance(node, ast.Expr) and (timed := _of_magic(node.value)):
                codes += statements(timed)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    node.names = [alias]
                    codes.append(read(node))
            else:
                codes.append(_statement(node))
    return codes


def _of_magic(node: ast.expr) -> str:
    """What stands behind a magic that is a statement of its own; it may be Python."""
    match node:
        case ast.Call(
            ast.Attribute(attr="run_line_magic" | "run_cell_magic"), [*_, ast.Constant(text)]
        ):
            return text
    return ""


def _statement(node: ast.stmt) -> Code:
    code = read(node)
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        code.changes.clear()
    elif not isinstance(node, ast.Assign | ast.AnnAssign):
        # What a loop or a branch binds may be bound, or not.
        code.changes |= code.binds
        code.binds = set()
    return code


@cache
def _behind(
    sources: tuple[str, ...], parameters: frozenset[str], cells: range, rooms: tuple[str, ...]
) -> dict[str, str]:
    """What the statements that save rows in these cells depend on."""
    hashes: dict[str, str] = {}
    before: list[Code] = []
    for cell, source in enumerate(sources):
        needed: set[int] = set()
        tables: list[str] = []
        for code in statements(source):
            before.append(code)
            if code.tables and cell in cells:
                needed |= _needed(before, parameters)
                tables += code.tables
        if needed:
            codes = [before[place] for place in sorted(needed)]
            digest = _digest(codes)
            cell_name = f"the cell that saves {', '.join(dict.fromkeys(tables))} #{digest[:6]}"
            hashes |= _files(codes, rooms) | {cell_name: digest}
    return dict(sorted(hashes.items()))


def _needed(before: Sequence[Code], parameters: frozenset[str]) -> set[int]:
    """The places of the last statement and of all that bind what it uses, and so on; no parameters."""
    last = len(before) - 1
    needed: set[int] = set()
    waiting = [last]
    while waiting:
        place = waiting.pop()
        if place in needed:
            continue
        needed.add(place)
        code = before[place]
        for name in code.looks_up:
            waiting += _binders(before[:place], name)
            if code.has_functions:  # which look their names up when they are called
                waiting += _binders(before[:last], name)
    return {place for place in needed if not _is_parameter(before[place], parameters)}


def _is_parameter(code: Code, parameters: frozenset[str]) -> bool:
    return bool(code.binds) and not code.looks_up and code.binds <= parameters


def _binders(before: Sequence[Code], name: str) -> Iterator[int]:
    """The last statement that binds a name, and those that may have changed it since."""
    for place in reversed(range(len(before))):
        code = before[place]
        if name in code.binds | code.changes:
            yield place
        if name in code.binds:
            return
