"""What a measurement depends on: the code of the notebook that measures, and of every module behind it.

Found by a static walk, so it costs no run. In a notebook it begins at the statements that save rows (a call
of `.measure`, `.save` or `save_rows`) and goes to the statements that bind the names they use, and so on; in
a module, at all its imports, wherever they stand, and at the modules that its strings name. A name that is
imported from a package, or taken as its attribute, is followed to the module that has it; where that cannot
be told the whole package counts. Hashed is the syntax tree without docstrings: no comment, no layout, and the
same in every Python. The values of a notebook's parameters are not code.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from labbook.files import NOTEBOOKS, PROJECT

WHILE_RUNNING = "changed while running"
_ROOTS = (PROJECT / "lib", NOTEBOOKS)
_PACKAGES = sorted(path.parent.name for path in _ROOTS[0].glob("*/__init__.py"))
_MODULE_NAME = re.compile(rf"\b(?:{'|'.join(_PACKAGES)})(?:\.\w+)+")
_SAVES = ("measure", "save", "save_rows")
_MUTATORS = ("add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "sort", "update")
_CHANGES_NOTHING = ("ctx", "kind", "type_comment", "type_ignores")


def of_notebook(path: Path) -> dict[str, str]:
    """The hashes of all that the rows of a notebook depend on: files, and its cells that save rows.

    Of a notebook that saves none: of all that it executes.
    """
    sources, parameters = _code_cells(path, path.stat().st_mtime_ns)
    return _behind(sources, parameters, range(len(sources))) or _behind_all(sources)


def of_cells(sources: Sequence[str], parameters: Iterable[str] = ()) -> dict[str, str]:
    """The same of what the last of some executed cells saves. A file newer than this process is marked.

    Args:
        sources: of the cells, in the order of their execution.
        parameters: the names whose literal values are no code.
    """
    found = _behind(sources, parameters, [len(sources) - 1])
    started = psutil.Process().create_time()
    newer = [name for name in found if (path := PROJECT / name).is_file() and path.stat().st_mtime > started]
    return found | dict.fromkeys(newer, WHILE_RUNNING)


def of_module(name: str) -> dict[str, str]:
    """The same of what a module measures: "package.bench"."""
    walk = _Walk()
    walk.follow_module(name)
    return walk.found


def parameter_names(path: Path) -> frozenset[str]:
    """The names that the parameters cell of a notebook binds."""
    return _code_cells(path, path.stat().st_mtime_ns)[1]


def notebook_of(slug: str) -> Path | None:
    """The notebook of a problem, if there is one."""
    return next(NOTEBOOKS.glob(f"[0-9][0-9]_{slug}.ipynb"), None)


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The files and cells of `before` that are other ones now, or gone."""
    return [name for name, digest in before.items() if now.get(name) != digest]


def why(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What changed, in a line: "attention/launcher.py changed since"; "" if nothing did."""
    names = [re.sub(r"^lib/[^/]+/(?=.*/)|^lib/| #\w+$", "", name) for name in changed(before, now)]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} changed since" if names else ""


# What a piece of code says.


@dataclass
class _Said:
    """text: its syntax tree. imports: (bound name, module, name in it, or "" for the module itself).

    uses: the attributes under which each name is used, "" for the name alone. named: modules in strings.
    binds: names bound. keeps: names whose value is changed. saves: a table for each call that saves rows.
    """

    text: list[str] = field(default_factory=list)
    imports: list[tuple[str, str, str]] = field(default_factory=list)
    uses: dict[str, set[str]] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    binds: set[str] = field(default_factory=set)
    keeps: set[str] = field(default_factory=set)
    saves: list[str] = field(default_factory=list)
    has_functions: bool = False

    def add(self, other: "_Said") -> None:
        """Of what both say, that which is hashed and followed."""
        self.text += other.text
        self.imports += other.imports
        self.named |= other.named
        for name, chains in other.uses.items():
            self.uses.setdefault(name, set()).update(chains)

    def digest(self) -> str:
        return hashlib.sha256("".join(self.text).encode()).hexdigest()[:12]


def _read(nodes: Iterable[ast.AST], package: str = "") -> _Said:
    """package: the one that the code is in, for relative imports."""
    reader = _Reader(package)
    for node in nodes:
        reader.visit(node, frozenset())
    return reader.said


class _Reader:
    """Collects what parts of a syntax tree say. `own`: names that a part has bound itself."""

    def __init__(self, package: str) -> None:
        self.said, self._package = _Said(), package

    def visit(self, node: Any, own: frozenset[str]) -> None:
        said = self.said
        if isinstance(node, ast.Name):
            said.text.append(f"{node.id};")
            if node.id not in own and isinstance(node.ctx, ast.Load):
                said.uses.setdefault(node.id, set()).add("")
            elif node.id not in own:
                said.binds.add(node.id)
        elif isinstance(node, ast.Attribute) and (chain := _chain(node)):
            said.text.append(f"{chain};")
            root, _, attributes = chain.partition(".")
            if root not in own:
                said.uses.setdefault(root, set()).add(attributes)
                said.keeps.update(
                    [root] if not isinstance(node.ctx, ast.Load) or node.attr in _MUTATORS else []
                )
        elif isinstance(node, ast.Constant):
            said.text.append(f"{node.value!a};")
            if isinstance(node.value, str) and "." in node.value:
                said.named.update(_MODULE_NAME.findall(node.value))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports, named = _imports(node, self._package)
            said.text.append(f"{imports};")
            said.imports += imports
            said.named |= named
            said.binds.update(bound for bound, _, _ in imports)
        elif isinstance(node, ast.AST):
            self._visit_fields(node, own)
        else:
            said.text.append(f"{node!a};")

    def _visit_fields(self, node: ast.AST, own: frozenset[str]) -> None:
        said, inner = self.said, own | _bound_inside(node)
        said.text.append(f"{type(node).__name__}(")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            said.binds |= {node.name} - own
        elif isinstance(node, ast.For | ast.With):
            said.binds |= inner - own
        said.has_functions |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if (
            isinstance(node, ast.Call)
            and (name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in _SAVES
        ):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            said.saves.append(str(texts[0]) if texts and name != "save_rows" else "rows")
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and not isinstance(node.ctx, ast.Load)
        ):
            said.keeps.add(node.value.id)
        for name in node._fields:
            value = getattr(node, name, None)
            if name in _CHANGES_NOTHING or value is None or value == []:
                continue
            said.text.append(f"{name}=")
            if isinstance(node, ast.JoinedStr):
                value = _literals_joined(value)
            elif name == "body" and _is_documented(node):
                value = value[1:]
            within = own if name in ("iter", "args", "decorator_list") else inner
            for each in value if isinstance(value, list) else [value]:
                self.visit(each, within)
                if name in ("body", "orelse", "finalbody"):  # what follows in a block uses what it has bound
                    within |= _assigned(each)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            self.visit(node.generators[0].iter, own)
        said.text.append(")")


def _bound_inside(node: ast.AST) -> frozenset[str]:
    """The names of a scope, of a loop or of a `with` that its parts find bound."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            inside = list(ast.walk(node))
            shared = {
                name for each in inside if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names
            }
            names = _stored(inside) | {each.arg for each in inside if isinstance(each, ast.arg)}
            return frozenset(names - shared)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            targets = [each.target for each in node.generators]
        case ast.For():
            targets = [node.target]
        case ast.With():
            targets = [each.optional_vars for each in node.items if each.optional_vars]
        case _:
            return frozenset()
    return frozenset(_stored(each for target in targets for each in ast.walk(target)))


def _assigned(node: ast.AST) -> frozenset[str]:
    """The names that a statement surely binds."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return frozenset(_stored(each for target in targets for each in ast.walk(target)))


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _chain(node: ast.expr) -> str:
    """ "a.b.c" of an attribute of a name, else ""."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := _chain(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def _is_documented(node: ast.AST) -> bool:
    has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return has_docstring and ast.get_docstring(node, clean=False) is not None


def _literals_joined(values: Sequence[ast.expr]) -> list[ast.expr | str]:
    """The parts of an f-string; versions of Python cut its text differently."""
    parts: list[ast.expr | str] = [""]
    for value in values:
        if isinstance(value, ast.Constant):
            parts[-1] += value.value
        else:
            parts += [value, ""]
    return parts


def _imports(node: ast.Import | ast.ImportFrom, package: str) -> tuple[list[tuple[str, str, str]], set[str]]:
    if isinstance(node, ast.Import):
        pairs = [(alias.asname or alias.name.partition(".")[0], alias) for alias in node.names]
        named = {alias.name for alias in node.names}
        return [(bound, alias.name if alias.asname else bound, "") for bound, alias in pairs], named
    parts = package.split(".")
    up = parts[: len(parts) + 1 - node.level] if node.level else []
    module = ".".join([*up, *filter(None, [node.module])])
    return [(alias.asname or alias.name, module, alias.name) for alias in node.names], set()


# Modules.


@cache
def _find(module: str) -> Path | None:
    """The file of a module of this repository."""
    for place in (root.joinpath(*module.split(".")) for root in _ROOTS if module):
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path
    return None


def _load(module: str, path: Path) -> tuple[_Said, dict[str, tuple[str, str]]]:
    stat = path.stat()
    return _loaded(module, path, stat.st_mtime_ns, stat.st_size)


@cache
def _loaded(module: str, path: Path, *_: int) -> tuple[_Said, dict[str, tuple[str, str]]]:
    """A file, and, of a package's __init__, what it only hands on: name -> (module, name)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.name != "__init__.py":
        return _read([tree], module.rpartition(".")[0]), {}
    exports: dict[str, tuple[str, str]] = {}
    for node in tree.body[:]:
        assigned = ast.unparse(node).partition(" =")[0] if isinstance(node, ast.Assign) else ""
        tables = [each for each in ast.walk(node) if isinstance(each, ast.Dict)] if assigned else []
        if isinstance(node, ast.ImportFrom):
            exports |= {bound: (source, name) for bound, source, name in _imports(node, module)[0]}
        elif tables and assigned in ("_EXPORTS", "__getattr__, __all__"):
            for source, names in ast.literal_eval(tables[0]).items():
                exports |= {name: (f"{module}.{source}", name) for name in names.split()}
        elif assigned != "__all__":
            continue
        tree.body.remove(node)
    said = _read([tree], module)
    said.imports += [
        (bound, *exports[bound]) for bound in exports if bound in said.uses
    ]  # it uses these itself
    return said, exports


class _Walk:
    """Collects in `found` the hash of each file that is reached."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._done: set[tuple[str, bool]] = set()

    def follow(self, said: _Said) -> None:
        for bound, module, name in said.imports:
            for chain in said.uses.get(bound, {""} if name == "*" else ()):
                self.follow_chain(module, ".".join(filter(None, [name, chain])))
            self.follow_module(module, whole=False)
        for text in sorted(said.named):
            while text and not _find(text):
                text = text.rpartition(".")[0]
            self.follow_module(text, whole=text not in _PACKAGES)

    def follow_chain(self, module: str, chain: str) -> None:
        """What `module.a.b` is, the chain being "a.b"; the module itself, handed on, where there is none."""
        path, (name, _, rest) = _find(module), chain.partition(".")
        self.follow_module(module, whole=name in ("", "*") or path is None or path.name != "__init__.py")
        if path is None or path.name != "__init__.py" or name in ("", "*"):
            return
        said, exports = _load(module, path)
        if _find(f"{module}.{name}"):
            self.follow_chain(f"{module}.{name}", rest)
        elif name in exports:
            source, original = exports[name]
            if _find(source):
                self.found[f"{path.relative_to(PROJECT)}: {name}"] = f"{source}.{original}"
            self.follow_chain(source, ".".join(filter(None, [original, rest])))
        elif name not in said.binds:
            self.follow_module(module)

    def follow_module(self, module: str, *, whole: bool = True) -> None:
        """A module and all that it imports; of a package that is not `whole` its __init__ alone."""
        path = _find(module)
        if path is None or (module, whole) in self._done:
            return
        self._done.add((module, whole))
        self.follow_module(module.rpartition(".")[0], whole=False)
        name, (said, _) = str(path.relative_to(PROJECT)), _load(module, path)
        if name not in self.found:
            self.found[name] = said.digest()
            self.follow(said)
        if whole and path.name == "__init__.py":
            for each in sorted(path.parent.glob("*")):
                self.follow_module(f"{module}.{each.stem}")


# Notebooks.


@dataclass(frozen=True)
class _Statement:
    """A statement of a cell. binds: names that it surely gives a value. changes: other names, perhaps."""

    cell: int
    said: _Said
    binds: set[str]
    changes: set[str]


@cache
def _code_cells(path: Path, _: int) -> tuple[list[str], frozenset[str]]:
    """The sources of a notebook's code cells, and the names of its parameters."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [("".join(c["source"]), c["metadata"].get("tags", [])) for c in cells if c["cell_type"] == "code"]
    parameters = (
        name for source, tags in code if "parameters" in tags for each in _cell(source) for name in each[1]
    )
    return [source for source, _ in code], frozenset(parameters)


@cache
def _cell(source: str) -> list[tuple[_Said, set[str], set[str]]]:
    """What each statement of a cell says, binds and changes. Lines for IPython are no code."""
    try:
        body = ast.parse(re.sub(r"^\s*[%!?].*$", "", source, flags=re.MULTILINE)).body
    except SyntaxError:
        return []
    return [part for node in body for part in _parts(node)]


def _parts(node: ast.stmt) -> Iterator[tuple[_Said, set[str], set[str]]]:
    said = _read([node])
    if isinstance(node, ast.Import | ast.ImportFrom):  # each name by itself: the other names do not matter
        for one in said.imports:
            yield _Said([f"{one};"], [one], named=set() if one[2] else said.named), {one[0]}, set()
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield said, {node.name}, set()
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        yield said, said.binds, said.keeps
    else:
        yield said, set(), said.binds | said.keeps


def _behind(sources: Sequence[str], parameters: Iterable[str], cells: Iterable[int]) -> dict[str, str]:
    """What the statements that save rows in these cells depend on; also calls of functions that save."""
    statements = [_Statement(cell, *part) for cell, source in enumerate(sources) for part in _cell(source)]
    saving: dict[str, list[str]] = {}  # the tables of functions that save
    found: dict[int, tuple[set[int], list[str]]] = {}
    for place, each in enumerate(statements):
        tables = each.said.saves + [table for name in each.said.uses for table in saving.get(name, ())]
        if each.said.has_functions and each.binds and tables:
            saving |= dict.fromkeys(each.binds, tables)
        elif tables and each.cell in cells:
            places, names = found.setdefault(each.cell, (set(), []))
            places |= _needed(statements, place, set(parameters))
            names += tables
    walk = _Walk()
    for places, tables in found.values():
        whole = _Said()
        for place in sorted(places):
            whole.add(statements[place].said)
        walk.follow(whole)
        walk.found[f"the cell that saves {', '.join(dict.fromkeys(tables))} #{whole.digest()[:6]}"] = (
            whole.digest()
        )
    return dict(sorted(walk.found.items()))


def _behind_all(sources: Iterable[str]) -> dict[str, str]:
    walk, whole = _Walk(), _Said()
    for said, _, _ in (part for source in sources for part in _cell(source)):
        whole.add(said)
    walk.follow(whole)
    return dict(sorted(walk.found.items())) | {"its cells": whole.digest()}


def _needed(statements: list[_Statement], last: int, parameters: set[str]) -> set[int]:
    """The places of a statement and of all that bind what it uses, and so on, without parameters' values."""
    needed, waiting = set(), [last]
    while waiting:
        if (place := waiting.pop()) not in needed:
            needed.add(place)
            said = statements[place].said
            for before in {
                place,
                last if said.has_functions else place,
            }:  # functions look their names up later
                waiting += [each for name in said.uses for each in _binders(statements, name, before)]
    values = {place for place in needed if (each := statements[place]).binds and each.binds <= parameters}
    return needed - {place for place in values if not statements[place].said.uses}


def _binders(statements: list[_Statement], name: str, before: int) -> Iterator[int]:
    """The last statement that binds a name, and those that may have changed it since."""
    for place in range(before - 1, -1, -1):
        if name in statements[place].binds:
            yield place
            return
        if name in statements[place].changes:
            yield place
