"""What a measurement depends on: executed code makes it stale, what only shows and mere words do not."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

from labbook import bench, code, ranks, timing
from labbook.project import project

# Module, some notebooks that measure with it, some that do not.
EXECUTED = [
    ("cs336_systems/attention/kernel_launch.py", "24 25 26 27 61", "13 31"),
    ("cs336_systems/attention/hopper_forward.py", "24 26 27 61", "13 31"),
    ("cs336_systems/functional.py", "11 16 33 61", "13"),
    ("cs336_systems/kernels/weighted_sum.py", "23", "11 13 21 24 33 44"),
    ("cs336_systems/model.py", "11 12 15 16 33 42 61", "13 23 24 26 31"),
    ("cs336_systems/parallel/fsdp.py", "42 44 61", "13 16 21 23 24 26"),
    ("cs336_systems/parallel/launch.py", "11 31 32 33 36 42 61", "13 16 21 23 24 26"),
    ("cs336_systems/training/fused_block.py", "61", "13 21 23 33"),
]
# No timed step executes them.
NOT_RUN = {"__init__.py", "__main__.py", "sharding.py", "versions.py"}
MEASURED = tuple(room.replace(".", "/") for room in project().measured)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository to change."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("lib", "notebooks"):
        shutil.copytree(
            project().root / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "_folder", lambda package: root / "lib" / package)
        forget()
        yield root
    forget()


def forget():
    """What this process has read of modules, as a new one would."""
    code._path.cache_clear()
    code._module.cache_clear()


@pytest.fixture(scope="module")
def before(copy):
    return of_all(copy)


def of_all(root):
    """Of the notebooks that measure, by their number."""
    forget()
    found = {
        path.name[:2]: code.of_notebook(path) for path in (root / "notebooks").glob("[1-9]*.ipynb")
    }
    return {number: hashes for number, hashes in sorted(found.items()) if "its cells" not in hashes}


def stale(before, root):
    now = of_all(root)
    return {name for name in before if code.changed(before[name], now[name])}


@pytest.fixture
def change(copy, monkeypatch):
    """Change a file by a function of its text; it is put back afterwards."""
    originals = {}

    def change(name, function):
        path = copy / name
        text = path.read_text(encoding="utf-8")
        originals.setdefault(path, (text, path.stat().st_mtime_ns))
        path.write_text(function(text), encoding="utf-8")
        assert path.read_text(encoding="utf-8") != text

    yield change
    for path, (text, mtime) in originals.items():
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(mtime, mtime))


def one_line_changed(text):
    return re.sub(r"^( +)return (?=\S)", r"\1return 0 or ", text, count=1, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("module", "measures", "does_not"), EXECUTED, ids=[name for name, *_ in EXECUTED]
)
def test_a_changed_line_makes_stale_what_runs_it_and_nothing_else(
    before, copy, change, module, measures, does_not
):
    change(f"lib/{module}", one_line_changed)
    found = stale(before, copy)
    assert (set(measures.split()) - found, found & set(does_not.split())) == (set(), set())


def test_what_is_not_measured_and_what_is_only_words_makes_nothing_stale(before, copy, change):
    for path in list((copy / "lib").rglob("*.py")):
        name = str(path.relative_to(copy / "lib"))
        edit = with_other_words if name.startswith(MEASURED) else with_another_line
        change(f"lib/{name}", edit)
    change("notebooks/vocabulary.py", lambda text: text.replace("| vermillion", "| sky"))
    for path in (copy / "notebooks").glob("*.ipynb"):
        change(f"notebooks/{path.name}", with_other_words_in_cells)
    assert stale(before, copy) == set()


def with_another_line(text):
    return f"{text}\nANOTHER = 1\n"


def test_every_room_is_measured_but_what_checks_counts_or_starts():
    files = (project().root / "lib" / "cs336_systems").rglob("*.py")
    names = {str(path.relative_to(project().root / "lib")) for path in files}
    others = {name.split("/")[1] for name in names if not name.startswith(MEASURED)}
    assert not others - {"accounting", "checks"} - NOT_RUN


def test_the_version_of_timing_is_raised_where_its_steps_change():
    """Another digest: raise timing.VERSION if a step would get another number, then write it here."""
    steps = (
        timing.clock_ms,
        timing.time_steps,
        timing.time_compiled,
        timing.time_cold_cache,
        ranks.time_together,
        ranks.one_step_ms,
        bench.Step.timed,
    )
    sources = "\n".join(textwrap.dedent(inspect.getsource(step)) for step in steps)
    digest = code._digest(code.normalised(code.ast.parse(sources)))
    assert (timing.VERSION, digest) == ("1", "39fcc0f7aef6")
    assert code.of_notebook(code.notebook_of("weighted_sum"))["labbook.timing"] == "1"


def with_other_words(text):
    """Another docstring of the module, a comment and a blank line at the end."""
    return f'"""Other words. {text[3:]}' if text.startswith('"""') else f"# Words.\n\n{text}"


def with_other_words_in_cells(text):
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            shows = "title=" in source or "caption=" in source
            other = source.replace('title="', 'title="No. ') if shows else source
            cell["source"] = f"# A comment.\n{other}"
    notebook["cells"].append(
        {"cell_type": "code", "source": "show(1)", "metadata": {}, "outputs": []}
    )
    return json.dumps(notebook)


def test_a_notebook_depends_on_its_saving_cells_and_one_without_on_all_of_it():
    found = {
        path.name[:2]: code.of_notebook(path) for path in project().notebooks.glob("[1-9]*.ipynb")
    }
    without = {number for number, hashes in found.items() if "its cells" in hashes}
    assert without == {"41", "43", "51", "52", "53", "54", "56"}
    assert "cs336_systems/accounting/scaling.py" in found["56"]
    cells = [name for name in found["27"] if name.startswith("the cell that saves flash_times")]
    assert len(cells) == 1


@pytest.fixture
def of(tmp_path, write_notebook):
    """The hashes of a notebook with these cells, the first its parameters."""
    return lambda first, *cells: code.of_notebook(
        write_notebook(tmp_path / "a.ipynb", *cells, parameters=first)
    )


CELLS = [
    "steps = 10  # measured steps",
    "from labbook import Page, lines\nfrom cs336_systems.training.steps import autocast\npage = Page('a')",
    "def scale(x):\n    return factor * x\n\nunused = 1",
    "factor = [2, 2][1:]\nhow = {'steps': steps}\nhow |= {'more': 1}\nhow['last'] = 2",
    "for n in range(3):\n    rows = [scale(n)] + autocast(n)\n    page.save(rows, 'accumulation', **how)",
    "lines(page.rows('accumulation'))",
]


@pytest.mark.parametrize(
    ("cell", "old", "new", "matters"),
    [
        (0, "10", "20", False),  # a parameter's value
        (1, "Page, lines", "Page, bars", False),
        (
            1,
            "training.steps import autocast",
            "parallel.launch import stream as autocast",
            True,
        ),
        (2, "factor * x", "factor + x", True),
        (2, "unused = 1", "n = 5", False),  # the loop has its own
        (2, "def scale(x):\n", "def scale(x):\n    '''Words.'''\n", False),
        (3, "factor = [2", "factor = [3", True),  # found by a function, after it
        (3, "'more': 1", "'more': 2", True),
        (3, "= 2", "=  2  # layout", False),
        (3, "['last'] = 2", "['last'] = 3", True),
        (5, "accumulation", "other", False),
    ],
)
def test_of_a_notebook_counts_what_its_saving_cells_use(of, cell, old, new, matters):
    assert old in CELLS[cell]
    after = [
        source.replace(old, new) if place == cell else source for place, source in enumerate(CELLS)
    ]
    assert bool(code.changed(of(*CELLS), of(*after))) == matters


def test_executed_cells_have_the_hashes_of_the_notebook(of):
    written = of(*CELLS)
    executed = ["", CELLS[0].replace("10", "3")] + CELLS[1:5]
    assert code.of_cells(executed, ["steps"]) == written
    assert code.of_cells(executed + ["lines(1)"], ["steps"]) == {}


def test_a_file_that_changes_after_it_was_imported_does_not_count_as_what_ran(copy, change):
    forget()
    imported = code.of_cells(CELLS[:5], ["steps"])
    change("lib/cs336_systems/training/steps.py", one_line_changed)
    assert code.of_cells(CELLS[:5], ["steps"]) == imported
    forget()
    changed = code.changed(imported, code.of_cells(CELLS[:5], ["steps"]))
    assert changed == ["training/steps.py"]


FORMS = """\
import json
from pathlib import Path
from labbook import code
tree = code.ast.parse('''
def f(a, /, *b, c=1e3, **d):
    "words"
    x: int = a[1:2, ::3]
    with open(a) as g, open(b): pass
    return f"{a!r:>{c}} text" f"{b=}" "more" if not d else (lambda y: (yield))
class C(int, metaclass=type):
    async def m(self): return [i async for i in self if i]
match x:
    case {"a": [1, *_], **r}: pass
    case C(b=2) | 3: pass
''')
print(code._digest(code.normalised(tree)))
"""


def test_the_hash_is_the_same_in_every_python():
    """Of these forms it is written down; another Python that is here must agree."""
    others = filter(None, (shutil.which(f"python3.{n}") for n in range(11, 16)))
    path = os.pathsep.join([str(project().root / "lib")] + sys.path)
    options = {"capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": path}}
    for python in [sys.executable] + list(others):
        process = subprocess.run([python, "-c", FORMS], **options)
        # Another Python may lack what labbook imports.
        if python == sys.executable or process.returncode == 0:
            assert process.stdout.strip() == "2edd4b4fa4c0"


@pytest.mark.parametrize(
    "line",
    ["setup?", "files = !ls", "took = %timeit -o work(1)", "if True:\n    !echo", "await work(1)"],
)
def test_a_cell_that_only_ipython_reads_is_code(line):
    setup = "def setup(case):\n    return work({})\n"
    saving = "%time page.measure('times', cases, setup)"
    before, now = (code.of_cells([setup.format(n) + line, saving]) for n in (1, 2))
    assert code.changed(before, now)
    # IPython keeps executed cells as it has transformed them.
    executed = "get_ipython().run_line_magic('time', \"page.measure('times', cases, setup)\")"
    assert code.of_cells([setup.format(1) + line, executed]) == before
