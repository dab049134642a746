"""The workbook at a glance: the handout's problems, the notebook of each, and what it found.

What a notebook found is the output of its cell tagged `headline`, an answer. The picture beside it is the
one that another cell with the tag saves for the reference machine, or else the first that the notebook
saves for it.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pandas as pd
from nbformat import NotebookNode
from PIL import Image

from cs336_systems.measure.files import REPOSITORY_FIGURES, figures_dir, find, write_atomically
from cs336_systems.measure.machine import MachineCard
from cs336_systems.measure.rows import load_rows
from cs336_systems.measure.schema import COLUMNS
from cs336_systems.report.html import Table
from cs336_systems.report.words import MISSING, significant, value_label
from cs336_systems.workbook.problems import PROBLEMS, Problem

NOTEBOOKS = REPOSITORY_FIGURES.parent / "notebooks"
HEADLINE = "headline"  # the tag
_WIDTH, _COLORS = 800, 64  # of a picture: enough to read it, and all of them stay below 1 MB together
_SHOWN_WIDTH = 600  # pixels on the page
_MAP = re.compile(r"(<!-- map[^>]*-->\n).*?(<!-- end of map -->)", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """What the map tells of a notebook. The headline is empty when no executed answer has the tag."""

    problem: Problem
    editions: tuple[int, ...]
    question: str
    executed: bool
    headline: str
    figure: str

    @property
    def link(self) -> str:
        """As in Markdown, from the folder of the notebooks."""
        return f"[{self.problem.title}]({self.problem.name}.ipynb)"


def read_pages(folder: Path | None = None) -> dict[str, Page]:
    """The notebooks there are, by name, in the order of the problems.

    Raises:
        ValueError: one is no notebook; the message names it.
    """
    paths = {problem: (folder or NOTEBOOKS) / f"{problem.name}.ipynb" for problem in PROBLEMS}
    return {problem.name: _read_page(problem, path) for problem, path in paths.items() if path.exists()}


def _read_page(problem: Problem, path: Path) -> Page:
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat has an exception for every way of being no notebook
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    parts = [" ".join(part.split()) for part in notebook.cells[0].source.split("\n\n")]
    handout = next((part for part in parts if part.startswith("*Handout problem")), "")
    question = next((part for part in parts if not part.startswith(("# ", "*Handout problem"))), "")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return Page(
        problem,
        tuple(map(int, re.findall(r"\b20\d\d\b", handout))),
        question.removeprefix("**The question.** "),
        all(cell.execution_count for cell in code),
        next((text for cell in code if _tagged(cell) for text in _answers(cell)), ""),
        next((stem for cell in sorted(code, key=_untagged) for stem in _saved(cell)), ""),
    )


def _tagged(cell: NotebookNode) -> bool:
    return HEADLINE in cell.metadata.get("tags", [])


def _untagged(cell: NotebookNode) -> bool:
    return not _tagged(cell)


def _answers(cell: NotebookNode) -> list[str]:
    """The Markdown among a cell's outputs, without the name of the deliverable that an answer begins with."""
    shown = [output.data.get("text/markdown") for output in cell.outputs if "data" in output]
    return [re.sub(r"^\*\*\(.*?\)\*\* ", "", text) for text in shown if text]


def _saved(cell: NotebookNode) -> list[str]:
    """Names of the figures that a cell saves for the reference machine."""
    return re.findall(r'\bsave\(\s*\w+,\s*slug,\s*"([\w.-]+)",\s*reference\b', cell.source)


def chapters() -> dict[str, list[Problem]]:
    """The problems of each chapter."""
    return {
        chapter: [problem for problem in PROBLEMS if problem.chapter == chapter]
        for chapter in dict.fromkeys(problem.chapter for problem in PROBLEMS)
    }


def map_table(pages: dict[str, Page], machine: str) -> str:
    """Every problem: its notebook, its question, how many rows a machine has of it. A table in Markdown."""
    lines = [f"| notebook | edition | its question | rows of {machine} |", "|:--|:--|:--|--:|"]
    for chapter, problems in chapters().items():
        lines.append(f"| **{chapter}** | | | |")
        for problem in problems:
            page, rows = pages.get(problem.name), row_count(problem.slug, machine)
            link, question = problem.title.replace("_", "_<wbr>"), "*not yet*"  # long names may be broken
            if page:
                link = f"[{link}]({problem.name}.ipynb)"
                question = in_short(page.question) + ("" if page.executed else " *(not executed yet)*")
            edition = "both" if len(problem.editions) > 1 else problem.editions[0]
            lines.append(f"| {link} | {edition} | {question} | {f'{rows:,}' if rows else MISSING} |")
    return "\n".join(lines)


def in_short(question: str) -> str:
    """The first sentence that asks something in more than a word or two; without one, the first sentence."""
    sentences = re.split(r"(?<=[.?!]) (?=[A-Z`])", question)
    asking = [each for each in sentences if each.endswith("?") and len(each.split()) > 3]
    return [*asking, *sentences][0]


def row_count(slug: str, machine: str) -> int:
    """How many rows a machine has of a problem, in all its tables."""
    roots = (figures_dir(), REPOSITORY_FIGURES)
    tables = {path.stem for root in roots for path in (root / machine / slug).glob("*.csv")}
    return sum(len(load_rows(slug, machine, table=table)) for table in tables)


def show_headline(page: Page, machine: str) -> None:
    """Display what a notebook found: question, picture, answer. Nothing where there is no answer yet."""
    from IPython.display import Markdown, display

    if not page.headline:
        return
    display(Markdown(f"### {page.link}\n\n*{page.question}*"))
    picture = find(machine, page.problem.slug, f"{page.figure}.png")
    if picture.is_file():
        shown = {"width": _SHOWN_WIDTH, "alt": f"{page.problem.slug}: {page.figure}"}
        bundle = {"image/png": _small(picture), "text/plain": "<figure>"}
        display(bundle, raw=True, metadata={"image/png": shown})
    display(Markdown(page.headline))


def _small(path: Path) -> bytes:
    """A saved picture with fewer pixels and colours."""
    with Image.open(path) as picture:
        height = round(picture.height * _WIDTH / picture.width)
        small = picture.convert("RGB").resize((_WIDTH, height), Image.Resampling.LANCZOS)
    # Of Pillow's ways the one that keeps the colour of a thin line; the others give two lines one colour.
    few = small.quantize(_COLORS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    few.save(buffer, "png", optimize=True)
    return buffer.getvalue()


def card_table(card: MachineCard) -> Table:
    """A machine's card: what it is, and what it was measured to do."""
    gpu = "none"
    if card.gpu != "none":
        gpu = f"{card.gpu}, {card.gpu_memory_gib:.0f} GiB, {card.sm_count} multiprocessors"
    lines = {
        "GPU": gpu,
        "CPU": f"{card.cpu}, {card.cores} cores, {card.memory_gib:.0f} GiB",
        "software": f"Python {card.python}, torch {card.torch}, triton {card.triton}",
    }
    for dtype, rate in card.matmul_tflops.items():
        lines[f"matrix products, {value_label(dtype)}"] = f"{significant(rate)} TFLOP/s, measured"
    lines["copying"] = f"{significant(card.copy_gbps)} GB/s, measured"
    return Table(pd.DataFrame({card.slug: lines.values()}, index=pd.Index(lines, name="machine")))


def row_read(row: pd.Series) -> Table:
    """One row, a line for each filled column, with its unit and meaning."""
    frame = _columns([name for name in row.index if not pd.isna(row[name])])
    texts = [COLUMNS[name].format(COLUMNS[name].check(row[name])) for _, name in frame.index]
    frame.insert(0, "in this row", texts)
    return Table(frame)


def vocabulary() -> Table:
    """Every column that a row may have, with its unit and meaning; folded, for it is long."""
    return Table(_columns(list(COLUMNS)), f"All {len(COLUMNS)} columns", folded=True)


def _columns(names: Sequence[str]) -> pd.DataFrame:
    columns = [COLUMNS[name] for name in names]
    says = [f"{column.description}{_one_of(column.allowed)}" for column in columns]
    index = pd.MultiIndex.from_arrays([[column.kind for column in columns], names], names=["", "column"])
    return pd.DataFrame({"unit": [column.unit for column in columns], "what it says": says}, index=index)


def _one_of(allowed: Sequence[str]) -> str:
    return f" ({', '.join(allowed)})" if allowed else ""


def renew_map(folder: Path) -> None:
    """Write the map into the README beside a folder of notebooks, between its two comments."""
    readme = folder.parent / "README.md"
    if readme.is_file():
        write_atomically(readme, with_map(readme.read_text(encoding="utf-8"), read_pages(folder)))


def with_map(readme: str, pages: dict[str, Page]) -> str:
    """The README's text with the map as it is now: a problem that is a link has its notebook."""
    lines = ["| chapter | problems |", "|:--|:--|"]
    for chapter, problems in chapters().items():
        # No-break spaces: a line does not end between a number and its name.
        titles = {problem: problem.title.replace(" ", "\u00a0") for problem in problems}
        names = [
            f"[{title}](notebooks/{problem.name}.ipynb)" if problem.name in pages else title
            for problem, title in titles.items()
        ]
        lines.append(f"| {chapter} | {', '.join(names)} |")
    table = "\n".join(lines)
    return _MAP.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", readme)
