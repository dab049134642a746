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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
_MUTATORS = (
    "add",
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "remove",
    "setdefault",
    "sort",
    "update",
)
_DOCUMENTED = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def of_notebook(path: Path) -> dict[str, str]:
    """The hashes of all that the rows of a notebook depend on: files, and its cells that save rows.

    Of a notebook that saves none: of all that it executes.
    """
    sources, parameters = code_cells(path)
    if found := _behind(sources, parameters, range(len(sources))):
        return found
    walk = _Walk()
    digest = walk.follow(*(each for source in sources for each in statements(source)))
    return {**dict(sorted(walk.found.items())), "its cells": digest}


def of_cells(sources: Sequence[str], parameters: Iterable[str] = ()) -> dict[str, str]:
    """The same of what the last of some executed cells saves. A file newer than this process is marked.

    sources: of the cells, in the order of their execution.
    parameters: the names whose literal values are no code.
    """
    found = _behind(sources, parameters, [len(sources) - 1])
    started = psutil.Process().create_time()
    newer = [
        name
        for name in found
        if (path := PROJECT / name).is_file() and path.stat().st_mtime > started
    ]
    return found | dict.fromkeys(newer, WHILE_RUNNING)


def notebook_of(slug: str) -> Path | None:
    """The notebook of a problem, if there is one."""
    return next(NOTEBOOKS.glob(f"[0-9][0-9]_{slug}.ipynb"), None)


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The files and cells of `before` that are other ones now, gone, or not known to be those that ran."""
    return [
        name
        for name, digest in before.items()
        if now.get(name) != digest or digest == WHILE_RUNNING
    ]


def why(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What changed, in a line: "attention/launcher.py changed since"; "" if nothing did."""
    names = [re.sub(r"^lib/[^/]+/(?=.*/)|^lib/| #\w+$", "", name) for name in changed(before, now)]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} changed since" if names else ""


# What a piece of code says.


@dataclass
class _Said:
    """What parts of a syntax tree say, that were read.

    text: the tree itself. named: modules in strings.
    imports: (bound name, module, name in it, or "" for the module itself); relative ones there are none.
    uses: the attributes under which each name is used, "" for the name alone.
    binds: names bound. keeps: names whose value is changed. saves: a table for each call that saves rows.
    """

    text: list[str] = field(default_factory=list)
    imports: list[tuple[str, str, str]] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    uses: dict[str, set[str]] = field(default_factory=dict)
    binds: set[str] = field(default_factory=set)
    keeps: set[str] = field(default_factory=set)
    saves: list[str] = field(default_factory=list)
    has_functions: bool = False

    def read(self, node: Any, own: frozenset[str] = frozenset()) -> "_Said":
        """Read a part of a tree too; own: names that the code around it has bound itself."""
        if not isinstance(node, ast.AST):
            self.text.append(f"{node!a};")
        elif chain := _chain(node):
            self.text.append(f"{chain};")
            root, _, attributes = chain.partition(".")
            is_read = isinstance(node.ctx, ast.Load)
            if root not in own and (attributes or is_read):
                self.uses.setdefault(root, set()).add(attributes)
            if root not in own and (not is_read or attributes.rpartition(".")[2] in _MUTATORS):
                (self.keeps if attributes else self.binds).add(root)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.imports += (imports := _imports(node))
            self.text.append(f"{imports};")
            self.named.update(alias.name for alias in node.names if isinstance(node, ast.Import))
            self.binds.update(bound for bound, _, _ in imports)
        else:
            self._read_fields(node, own)
        return self

    def _read_fields(self, node: ast.AST, own: frozenset[str]) -> None:
        inner = own | _bound_inside(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.binds |= {node.name} - own
        elif isinstance(node, ast.For | ast.With):
            self.binds |= inner - own
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.named.update(_MODULE_NAME.findall(node.value))
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            self.keeps.update({_chain(node.value).partition(".")[0]} - {""})
        elif isinstance(node, ast.Call) and (_chain(node.func).rpartition(".")[2] in _SAVES):
            texts = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            self.saves.append(texts[0] if texts else "rows")
        self.has_functions |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        self.text.append(f"{type(node).__name__}(")
        for name in node._fields:
            value = getattr(node, name, None)
            if name == "ctx" or value is None or value == []:
                continue
            if isinstance(node, ast.JoinedStr):
                value = _literals_joined(value)
            elif name == "body" and isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
                value = value[1:]
            self.text.append(f"{name}=")
            within = own if name in ("iter", "args", "decorator_list") else inner
            for each in value if isinstance(value, list) else [value]:
                self.read(each, within)
                if name in ("body", "orelse", "finalbody") and isinstance(each, ast.Assign):
                    within |= _stored(*each.targets)  # what follows in the block uses this
        if hasattr(node, "generators"):  # what the first one goes over belongs to the code around
            self.read(node.generators[0].iter, own)
        self.text.append(")")


def _digest(*several: _Said) -> str:
    return hashlib.sha256(
        "".join(text for said in several for text in said.text).encode()
    ).hexdigest()[:12]


def _bound_inside(node: ast.AST) -> frozenset[str]:
    """The names of a scope, a loop or a `with` that its parts find bound."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        shared = (
            each.names for each in ast.walk(node) if isinstance(each, ast.Global | ast.Nonlocal)
        )
        return _stored(node.args, *node.body).difference(*shared)
    if isinstance(node, ast.With):
        return _stored(*(each.optional_vars for each in node.items if each.optional_vars))
    if isinstance(node, ast.Lambda | ast.For):
        return _stored(getattr(node, "target", None) or node.args)
    return _stored(*(each.target for each in getattr(node, "generators", ())))


def _stored(*nodes: ast.AST) -> frozenset[str]:
    """The names that parts of a syntax tree bind, without those of scopes inside them."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg | ast.FunctionDef | ast.ClassDef):
            found.add(getattr(node, "arg", None) or node.name)
        elif not isinstance(node, ast.Lambda) and not hasattr(node, "generators"):
            found |= _stored(*ast.iter_child_nodes(node))
    return frozenset(found)


def _chain(node: ast.AST) -> str:
    """ "a.b.c" of an attribute of a name, "a" of a name, else ""."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := _chain(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def _literals_joined(values: Sequence[ast.expr]) -> list[ast.expr | str]:
    """The parts of an f-string; versions of Python cut its text differently."""
    parts: list[ast.expr | str] = [""]
    for value in values:
        if isinstance(value, ast.Constant):
            parts[-1] += value.value
        else:
            parts += [value, ""]
    return parts


def _imports(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str, str]]:
    if isinstance(node, ast.ImportFrom):
        return [(alias.asname or alias.name, node.module, alias.name) for alias in node.names]
    names = [(alias.asname or alias.name.partition(".")[0], alias) for alias in node.names]
    return [(bound, alias.name if alias.asname else bound, "") for bound, alias in names]


# Modules.


@cache
def _find(module: str) -> Path | None:
    """The file of a module of this repository."""
    for place in (root.joinpath(*module.split(".")) for root in _ROOTS if module):
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path
    return None


@cache
def _loaded(module: str, path: Path, _: int) -> tuple[_Said, dict[str, tuple[str, str]]]:
    """A file, and, of a package's __init__, what it only hands on: name -> (module, name)."""
    tree, exports = ast.parse(path.read_text(encoding="utf-8")), {}
    if path.name != "__init__.py":
        return _Said().read(tree), exports
    for node in tree.body[:]:
        assigned = ast.unparse(node).partition(" =")[0] if isinstance(node, ast.Assign) else ""
        if isinstance(node, ast.ImportFrom):
            exports |= {bound: (source, name) for bound, source, name in _imports(node)}
        elif assigned == "_NAMES":
            for source, names in ast.literal_eval(node.value).items():
                exports |= {name: (f"{module}.{source}", name) for name in names.split()}
        elif assigned != "__all__":
            continue
        tree.body.remove(node)
    said = _Said().read(tree)
    said.imports += [
        (name, *exports[name]) for name in exports if name in said.uses
    ]  # it uses these itself
    return said, exports


class _Walk:
    """Collects in `found` the hash of each file that is reached."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._done: set[tuple[str, bool]] = set()

    def follow(self, *several: _Said) -> str:
        """What all of them use together; returns their digest."""
        uses = defaultdict(set)
        for name, chains in (pair for said in several for pair in said.uses.items()):
            uses[name] |= chains
        for bound, module, name in (each for said in several for each in said.imports):
            for chain in uses.get(bound, ()):
                self.follow_chain(module, ".".join(filter(None, [name, chain])))
            self.follow_module(module, whole=False)
        for text in sorted(set().union(*(said.named for said in several))):
            while text and not _find(text):
                text = text.rpartition(".")[0]
            self.follow_module(text, whole=text not in _PACKAGES)
        return _digest(*several)

    def follow_chain(self, module: str, chain: str) -> None:
        """What `module.a.b` is, the chain being "a.b"; the module itself, handed on, where there is none."""
        path, (name, _, rest) = _find(module), chain.partition(".")
        is_package = path is not None and path.name == "__init__.py"
        self.follow_module(module, whole=not is_package or not name)
        if not is_package or not name:
            return
        said, exports = _loaded(module, path, path.stat().st_mtime_ns)
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
        name, (said, _) = (
            str(path.relative_to(PROJECT)),
            _loaded(module, path, path.stat().st_mtime_ns),
        )
        if name not in self.found:
            self.found[name] = _digest(said)
            self.follow(said)
        if whole and path.name == "__init__.py":
            for each in sorted(path.parent.glob("*")):
                self.follow_module(f"{module}.{each.stem}")


# Notebooks.


def code_cells(path: Path) -> tuple[list[str], set[str]]:
    """The sources of a notebook's code cells, and the names of its parameters."""
    cells = [
        c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"
    ]
    tagged = (cell for cell in cells if "parameters" in cell["metadata"].get("tags", ()))
    bound = (each.binds for cell in tagged for each in statements("".join(cell["source"])))
    return ["".join(cell["source"]) for cell in cells], set().union(*bound)


@cache
def statements(source: str) -> list[_Said]:
    """The statements of a cell: what each surely binds, and what it may change; not what IPython reads."""
    found = []
    with suppress(SyntaxError):
        for node in ast.parse(re.sub(r"^\s*[%!?].*$", "", source, flags=re.MULTILINE)).body:
            said = _Said().read(node)
            if isinstance(
                node, ast.Import | ast.ImportFrom
            ):  # each name by itself: others do not matter
                found += [
                    _Said([f"{one};"], [one], said.named, binds={one[0]}) for one in said.imports
                ]
                continue
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                said.binds, said.keeps = {node.name}, set()
            elif not isinstance(node, ast.Assign | ast.AnnAssign):
                said.binds, said.keeps = set(), said.binds | said.keeps
            found.append(said)
    return found


def _behind(
    sources: Sequence[str], parameters: Iterable[str], cells: Iterable[int]
) -> dict[str, str]:
    """What the statements that save rows in these cells depend on; also calls of functions that save."""
    walk, before, saving = _Walk(), [], {}  # saving: the tables of functions that save
    for cell, source in enumerate(sources):
        places, found = set(), []
        for each in statements(source):
            tables = each.saves + [table for name in each.uses for table in saving.get(name, ())]
            before.append(each)
            if each.has_functions and each.binds and tables:
                saving |= dict.fromkeys(each.binds, tables)
            elif tables and cell in cells:
                places |= _needed(before, set(parameters))
                found += tables
        if places:
            digest = walk.follow(*(before[place] for place in sorted(places)))
            walk.found[f"the cell that saves {', '.join(dict.fromkeys(found))} #{digest[:6]}"] = (
                digest
            )
    return dict(sorted(walk.found.items()))


def _needed(before: list[_Said], parameters: set[str]) -> set[int]:
    """The places of the last statement and of all that bind what it uses, and so on; no parameters."""
    last, needed, waiting = len(before) - 1, set(), [len(before) - 1]
    while waiting:
        if (place := waiting.pop()) not in needed:
            needed.add(place)
            said = before[place]  # whose functions look their names up when they are called
            for end in {place, last if said.has_functions else place}:
                waiting += [each for name in said.uses for each in _binders(before[:end], name)]
    values = {place for place in needed if (said := before[place]).binds and not said.uses}
    return needed - {place for place in values if before[place].binds <= parameters}


def _binders(before: list[_Said], name: str) -> Iterator[int]:
    """The last statement that binds a name, and those that may have changed it since."""
    for place, each in reversed(list(enumerate(before))):
        if name in each.binds | each.keeps:
            yield place
        if name in each.binds:
            return
