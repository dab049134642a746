"""What a measurement depends on: the cells that measure, and the measured rooms that they lead to.

Found by a static walk, so it costs no run. In a notebook it begins at the statements that save rows (a call
of `.measure`, `.save` or `save_rows`) and goes to the statements that bind the names they use, and so on;
in a module of a measured room (`measured` in book.yaml), at all its imports, wherever they stand. What is
imported from a package leads to all that its `__init__` imports. Other rooms are not followed: they check,
count or show. Of labbook there is the version of its timing. The values of parameters are not code.

A module is read once in a process, so that its hash is that of what was imported: when a page begins, which
compares the rows on record with it, or, where there are none, when something is measured.
"""

import ast
import dis
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

from IPython.core.inputtransformer2 import TransformerManager

from labbook import timing
from labbook.project import project

_SAVES = ("measure", "save", "save_rows")
_MUTATORS = re.compile("add|append|clear|extend|insert|pop|remove|setdefault|sort|update")
_LOOKS_UP = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_DOCUMENTED = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Of a dumped tree: what some versions of Python print and others leave out; and all ", ", those in strings
# too: "a, b" and "ab" are one.
_OPTIONAL = re.compile(r"\w+=(\[\]|Load\(\))|, ")


def of_notebook(path: Path) -> dict[str, str]:
    """The hashes of all that the rows of a notebook depend on: files, and its cells that save rows.

    Of a notebook that saves none: of all that it executes in the packages that have measured rooms.
    """
    cells, _ = code_cells(path)
    executed = _statements(cells)
    hashes = {}
    for table in {table for statement in executed for table in statement.tables}:
        hashes |= of_table(path, table)
    if hashes:
        return hashes
    packages = [room.partition(".")[0] for room in project().measured]
    digest = _digest(*(statement.text for statement in executed))
    return _files(executed, packages) | {"its cells": digest}


def of_table(path: Path, table: str) -> dict[str, str]:
    """The same of one table: of the cells that name it, which may be none."""
    cells, parameters = code_cells(path)
    hashes = {}
    for place, source in enumerate(cells):
        if any(table in statement.tables for statement in statements(source)):
            hashes |= of_cells(cells[: place + 1], parameters)
    return hashes


def of_cells(sources: Sequence[str], parameters: Collection[str] = ()) -> dict[str, str]:
    """The same of what the last of some executed cells saves.

    sources: of the cells, in the order of their execution.
    parameters: the names whose literal values are no code.
    """
    executed = _statements(sources[:-1])
    places = set()
    tables = []
    for statement in statements(sources[-1]):
        executed.append(statement)
        if statement.tables:
            places |= _needed(executed)
            tables += statement.tables
    if not tables:
        return {}
    needed = [
        executed[place] for place in sorted(places) if not executed[place].only_sets(parameters)
    ]
    digest = _digest(*(statement.text for statement in needed))
    cell = f"the cell that saves {', '.join(dict.fromkeys(tables))} #{digest[:6]}"
    return _files(needed, project().measured) | {"labbook.timing": timing.VERSION, cell: digest}


def notebook_of(slug: str) -> Path:
    """The notebook of a problem. Raises FileNotFoundError: there is none."""
    for path in project().notebooks.glob(f"[0-9][0-9]_{slug}.ipynb"):
        return path
    raise FileNotFoundError(f"{project().notebooks} has no notebook NN_{slug}.ipynb")


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The files and cells of `before` that are other ones now, or gone: "attention/launcher.py"."""
    names = [name for name, digest in before.items() if now.get(name) != digest]
    # Without their package, and without the digest that tells two cells apart.
    return sorted({re.sub(r"^[\w.]+/| #\w+$", "", name) for name in names})


# A piece of code: its text, and what it imports.


def normalised(tree: ast.AST) -> str:
    """A syntax tree as text: no docstring, no layout, and the same in every Python. The tree is changed."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
        elif isinstance(node, ast.JoinedStr):
            node.values = _joined(node.values)
    return _OPTIONAL.sub("", ast.dump(tree))


def _joined(values):
    """The parts of an f-string; versions of Python cut its text differently."""
    parts = [""]
    for value in values:
        if isinstance(value, ast.Constant):
            parts[-1] += value.value
        else:
            parts += [value, ""]
    return parts


def _imports(tree):
    """Dotted names of modules, or of something in one; relative ones there are none."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(aliases):
                names.update(alias.name for alias in aliases)
            case ast.ImportFrom(module, aliases):
                names.update(f"{module}.{alias.name}" for alias in aliases)
    return names


def _digest(*texts):
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


# Statements of notebooks.


@dataclass
class Statement:
    """A statement of a cell.

    looks_up: names that must be bound before. binds: names bound. changes: names whose value may change.
    tables: of calls that save rows.
    """

    imports: set[str]
    looks_up: set[str]
    binds: set[str]
    changes: set[str]
    tables: list[str]
    text: str

    def only_sets(self, names: Collection[str]) -> bool:
        """Whether it does nothing but bind some of these names to literals."""
        return self.binds <= set(names) and not self.looks_up | self.changes


def code_cells(path: Path) -> tuple[list[str], set[str]]:
    """The sources of a notebook's code cells, and the names of its parameters."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    sources = []
    parameters = set()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            sources.append("".join(cell["source"]))
            if "parameters" in cell["metadata"].get("tags", ()):
                for statement in statements(sources[-1]):
                    parameters |= statement.binds
    return sources, parameters


def _statements(sources):
    return [statement for source in sources for statement in statements(source)]


@cache
def statements(source: str) -> list[Statement]:
    """The statements of a cell, as IPython executes them; of %time and %%time those that they time.

    Of an import each name is a statement, for others of that line do not matter.
    """
    parsed = []
    with suppress(SyntaxError):  # such a cell does not run, so what follows the error saves nothing
        for node in ast.parse(TransformerManager().transform_cell(source)).body:
            match node:
                # A magic: its name, its options, its code.
                case ast.Expr(
                    ast.Call(
                        ast.Attribute(attr="run_line_magic" | "run_cell_magic"),
                        [*_, ast.Constant(code)],
                    )
                ):
                    parsed += statements(code)
                case ast.Import(names) | ast.ImportFrom(names=names):
                    # The same import again, of one name at a time.
                    for alias in names:
                        node.names = [alias]
                        parsed.append(_read(node))
                case _:
                    parsed.append(_read(node))
    return parsed


def _read(node):
    """Raises SyntaxError: it can only stand in a function."""
    tree = ast.Module([node], type_ignores=[])
    bytecode = compile(tree, "code", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    looks_up, binds = _names(bytecode)
    changes = _changes(tree)
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        # It changes nothing before it is called.
        changes = set()
    elif not isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom):
        # What a loop or a branch binds may be bound, or not.
        changes |= binds
        binds = set()
    imports = _imports(tree)
    tables = _tables(tree)
    # The text last, for to make it changes the tree.
    return Statement(imports, looks_up, binds, changes, tables, normalised(tree))


def _tables(tree):
    """Of calls that save rows the tables, as far as they are written there."""
    tables = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name(name) | ast.Attribute(attr=name), arguments) if name in _SAVES:
                texts = [str(each.value) for each in arguments if isinstance(each, ast.Constant)]
                tables += texts[:1] or ["rows"]
    return tables


def _changes(tree):
    """The names whose value may change: a method may change it, or a part of it is bound or deleted."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if _MUTATORS.fullmatch(name):
                names.add(_root(node))
            case ast.Attribute(ctx=context) | ast.Subscript(ctx=context):
                if not isinstance(context, ast.Load):
                    names.add(_root(node))
    return names


def _root(node):
    """ "a" of a.b[c].d."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _names(bytecode, bound=frozenset()):
    """The names that bytecode looks up before it binds them, and those that it binds.

    bound: names that are bound before.
    """
    looks_up = set()
    binds = set()
    for instruction in dis.get_instructions(bytecode):
        operand = instruction.argval
        if isinstance(operand, CodeType):
            # A function or a class: what it binds is its own.
            inner, _ = _names(operand, bound | binds)
            looks_up |= inner
        elif instruction.opname in _LOOKS_UP and operand not in bound | binds:
            looks_up.add(operand)
        elif instruction.opname == "STORE_NAME":
            binds.add(operand)
    return looks_up, binds


def _needed(executed):
    """The places of the last statement and of all that bind what it uses, and so on."""
    last = len(executed) - 1
    needed = set()
    waiting = [last]
    while waiting:
        place = waiting.pop()
        if place in needed:
            continue
        needed.add(place)
        for name in executed[place].looks_up:
            waiting += _binders(executed[:place], name)
            # A function looks its names up when it is called.
            waiting += _binders(executed[:last], name)
    return needed


def _binders(before, name):
    """The last statement that binds a name, and those that may have changed it since."""
    for place in reversed(range(len(before))):
        statement = before[place]
        if name in statement.binds | statement.changes:
            yield place
        if name in statement.binds:
            return


# Modules.


@cache
def _folder(package):
    """Where a package is that this process would import."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


@cache
def _path(name):
    """The file of a module, or of the one that something is in."""
    package, *parts = name.split(".")
    folder = _folder(package)
    if folder is None:
        return None
    place = folder.joinpath(*parts)
    for module in (place, place.parent):
        for file in (module / "__init__.py", module.with_suffix(".py")):
            if file.is_file():
                return file
    return None


@cache
def _module(path):
    """The hash of a module, and what it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return _digest(normalised(tree)), _imports(tree)


def _files(executed, rooms):
    """The hash of each file of some rooms that statements lead to."""
    prefixes = tuple(f"{room}." for room in rooms)
    files = {}
    waiting = [name for statement in executed for name in statement.imports]
    while waiting:
        name = waiting.pop()
        path = _path(name) if f"{name}.".startswith(prefixes) else None
        if path is None:
            continue
        package, _, _ = name.partition(".")
        file = str(path.relative_to(_folder(package).parent))
        if file not in files:
            digest, imports = _module(path)
            files[file] = digest
            waiting += imports
    return files
