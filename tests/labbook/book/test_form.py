"""Every committed notebook is in form: rules, each a generator of what is wrong."""

import ast
import json
import re

import nbformat
import pytest

from labbook.book.map import MARKS, first_cell, read_entry, sentences
from labbook.book.notebooks import is_last, read_parameters
from labbook.book.tidy import CHECKER, HIDE_INPUT, cleared, has_solution, tidy
from labbook.project import project

PATHS = sorted(project().notebooks.glob("*.ipynb"))
SECTIONS = ("Predict", "Build and check", "Measure", "Results", "Answer", "Summary", "Exercises")
MOST_IMPORTS = 7
MOST_BYTES = 2**20
_ABSOLUTE_PATH = r"(?<![\w./])/(?:home|root|work|tmp|Users|mnt|opt)/[\w./]+|\bC:\\"
_STRANGE_OUTPUT = re.compile(
    rf"{_ABSOLUTE_PATH}|\bat 0x[0-9a-f]{{6,}}|<svg|^image/\w+", re.MULTILINE
)


def problems(notebook, name):
    """A sentence for everything that keeps a notebook, NN_slug, from being committed; none if it is well."""
    rules = [_execution, _parameters, _cells, _pictures, _imports, _exercises, _outputs, _metadata]
    problems = [problem for rule in rules for problem in rule(notebook)]
    if not is_last(name):
        problems += _title(notebook, name)
        problems += _sections(notebook)
        problems += _in_short(notebook, name)
    return problems


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _execution(notebook):
    counts = [cell.execution_count for cell in _code(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"not executed top to bottom: the cells are numbered {counts}"
    outputs = [output for cell in _code(notebook) for output in cell.outputs]
    yield from (
        f"a cell ended with {output.ename}" for output in outputs if output.output_type == "error"
    )


def _pictures(notebook):
    for cell in _code(notebook):
        tree = ast.parse(re.sub(r"^%.*", "pass", cell.source, flags=re.MULTILINE))
        for node in ast.walk(tree):
            is_shown = tree.body and node is tree.body[-1]
            text = ast.unparse(node) if isinstance(node, ast.Expr) and not is_shown else ""
            if text.startswith("page.figure("):
                yield f"a picture is drawn and not shown: {text}; allowed: display({text})"


def _title(notebook, name):
    number, _, slug = name.partition("_")
    first = notebook.cells[0].source.split("\n")[0] if notebook.cells else ""
    if not re.match(rf"# {number} · \w+", first):
        yield f"the first line is {first!r}; allowed: '# {number} · a title in words'"
    about = first_cell(notebook)
    yield from (
        f"the first cell has no {what.strip('*:')}" for what, text in about.items() if not text
    )
    if not re.match(rf"`{slug}`, Spring (2025|2026)\b", about[MARKS[0]]):
        yield f"the first cell tells of {about[MARKS[0]]!r}; allowed: `{slug}` and its editions"


def _in_short(notebook, name):
    text = f"**In short.** {sentences(read_entry(name, notebook).headline)[0]}"
    if not notebook.cells[1].source.startswith(text):
        yield f"the second cell says {notebook.cells[1].source!r}; allowed: {text!r}, and the picture"


def _sections(notebook):
    """The usual ones; between "## Answer" and the next section the outputs are read, not the code."""
    sections = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            sections += re.findall(r"^## (.+?)\s*$", cell.source, re.MULTILINE)
        elif sections[-1:] == ["Answer"] and HIDE_INPUT not in cell.metadata.get("tags", []):
            yield f"cell [{cell.execution_count}] of the answers is not tagged `{HIDE_INPUT}`"
    if tuple(sections) != SECTIONS:
        yield f"the sections are {', '.join(sections) or 'none'}; allowed: {', '.join(SECTIONS)}"


def _parameters(notebook):
    parameters = read_parameters(notebook)
    if not parameters:
        yield "no cell is tagged `parameters`, or it is empty"
    for parameter in parameters.values():
        if not parameter.help:
            yield f"parameter {parameter.name} has no comment"


def _cells(notebook):
    if not all(cell.source.strip() for cell in _code(notebook)):
        yield "a code cell is empty"
    for cell in notebook.cells:
        if unfinished := re.search(r"\b(TODO|FIXME|XXX)\b", cell.source):
            yield f"{unfinished[0]} is left in: {cell.source.strip().splitlines()[0]!r}"
        if path := re.search(_ABSOLUTE_PATH, cell.source):
            yield f"absolute path in a cell: {path[0]!r}"


def _imports(notebook):
    """Few, and from the rooms of the library, by public names."""
    nodes = [node for cell in _code(notebook) for node in ast.walk(ast.parse(cell.source))]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    if len(imports) > MOST_IMPORTS:
        yield f"{len(imports)} imports; allowed: {MOST_IMPORTS}"
    for node in imports:
        modules = [getattr(node, "module", None) or alias.name for alias in node.names]
        is_deep = any(re.match(r"cs336_systems\..+\.|labbook\.(?!book)", name) for name in modules)
        if is_deep or any(alias.name.startswith("_") for alias in node.names):
            yield f"`{ast.unparse(node)}`; allowed: public names of a room, as in labbook"


def _exercises(notebook):
    """A solution is checked before the next one comes, and committed solutions are right."""
    if any(map(has_solution, cleared(notebook).cells)):
        yield "a solution's mark is without its other end"
    unchecked = None
    for cell in _code(notebook):
        where = f"cell [{cell.execution_count}]"
        if has_solution(cell):
            if unchecked:
                yield f"{unchecked} is a solution without a checker"
            unchecked = where
        elif CHECKER in cell.metadata.get("tags", ()):
            unchecked = None
            text = "".join(output.get("text", "") for output in cell.outputs)
            if not text.endswith(": right\n") or "✗" in text:
                yield f"{where} checks a step and says {text[-60:]!r}; allowed: that it is right"
    if unchecked:
        yield f"{unchecked} is a solution without a checker"


def _outputs(notebook):
    outputs = [(cell, output) for cell in _code(notebook) for output in cell.outputs]
    size = len(json.dumps([output for _, output in outputs]))
    if size > MOST_BYTES:
        yield f"outputs take {size:,} bytes; allowed: {MOST_BYTES:,}"
    for cell, output in outputs:
        data = dict(output.get("data", {}))
        data.pop("image/png", None)
        texts = list(data) + list(map(str, data.values())) + [output.get("text", "")]
        # What a script draws is not kept.
        text = re.sub("<script>.*?</script>", "", "\n".join(texts), flags=re.DOTALL)
        for match in _STRANGE_OUTPUT.finditer(text):
            yield f"output of cell [{cell.execution_count}]: {match[0]}, another one elsewhere, or no PNG"


def _metadata(notebook):
    clean = tidy(notebook)
    for part in notebook.keys() - {"cells"}:
        if notebook[part] != clean[part]:
            yield f"{part} is {dict(notebook)[part]}; allowed: {clean[part]} (make notebooks writes it)"
    for cell, wanted in zip(notebook.cells, clean.cells, strict=True):
        if cell != wanted:
            yield f"cell {cell.id} keeps metadata that changes from run to run (make notebooks strips it)"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_form(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert problems(notebook, path.stem) == []
