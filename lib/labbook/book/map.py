"""The workbook at a glance: what each notebook asks, as its first cell says, and what it found.

What it found is the output of its cell tagged `headline`, an answer. The picture beside it is the one that
another cell with the tag shows of committed rows, or else the first that the notebook shows of them.
"""

import base64
import io
import re
from pathlib import Path
from typing import NamedTuple

import nbformat
from IPython import display
from nbformat import NotebookNode
from PIL import Image

from labbook.book import notebooks
from labbook.rows import run_counts

MARKS = ("*Handout problem", "**The question.**", "*Read before:*", "*Time:*")
_AROUND = r"^\*\*\(.*?\)\*\* |\s*<details>.*"  # an answer: its name, and its list of claims
_WIDTH, _COLORS = (
    800,
    64,
)  # of a picture: enough to read it, and all of them stay below 1 MB together
_SHOWN_WIDTH = 600  # pixels on the page


class Entry(NamedTuple):
    """What the map tells of a notebook. The headline is empty when no executed answer has the tag.

    read_before: numbers of other notebooks. minutes: to read it, and to work through it. picture: an output.
    """

    name: str
    editions: tuple[str, ...]
    question: str
    read_before: tuple[str, ...]
    minutes: tuple[str, ...]
    headline: str
    picture: NotebookNode | None


def read_map() -> dict[str, Entry]:
    """The notebooks there are, by name, without those that only show what the others found."""
    paths = [
        path
        for path in sorted(notebooks.folder().glob("*.ipynb"))
        if not notebooks.is_last(path.stem)
    ]
    return {path.stem: _read_entry(path) for path in paths}


def _read_entry(path: Path) -> Entry:
    notebook = nbformat.read(path, as_version=4)
    handout, question, before, time = first_cell(notebook).values()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tagged = [cell for cell in code if "headline" in cell.metadata.get("tags", [])]
    shown = [
        out.data.get("text/markdown") for cell in tagged for out in cell.outputs if "data" in out
    ]
    drawn = [
        c for c in [*tagged, *code] if "page.figure" in c.source and "here=True" not in c.source
    ]
    pictures = (out for cell in drawn for out in cell.outputs if "image/png" in out.get("data", {}))
    return Entry(
        path.stem,
        tuple(re.findall(r"\b20\d\d\b", handout)),
        question,
        tuple(re.findall(r"\b\d\d\b", re.sub(r"\(.*?\)", "", before))),
        tuple(re.findall(r"\d+", time.replace("an hour", "60 minutes"))),
        next((re.sub(_AROUND, "", text, flags=re.DOTALL) for text in filter(None, shown)), ""),
        next(pictures, None),
    )


def first_cell(notebook: NotebookNode) -> dict[str, str]:
    """What follows each of MARKS in the first cell, up to the next, "More:" or the end of the paragraph."""
    source = notebook.cells[0].source if notebook.cells else ""
    ends = "|".join([r"\n\s*\n", r"\s\*More:", *(rf"\s{re.escape(mark)}" for mark in MARKS), "$"])
    found = {
        mark: re.search(rf"{re.escape(mark)}(.+?)(?={ends})", source, re.DOTALL) for mark in MARKS
    }
    return {mark: " ".join(match[1].split()) if match else "" for mark, match in found.items()}


def map_table(entries: dict[str, Entry], machine: str) -> str:
    """Every notebook by chapter, in Markdown: its question, what to read before, minutes, rows."""
    chapters = notebooks.read_yaml("book.yaml").get(
        "chapters", {}
    )  # by the number of their first notebook
    columns = "notebook", "edition", "question", "read before", "minutes", f"rows of {machine}"
    lines = [f"| {' | '.join(columns)} |", "|" + ":--|" * 5 + "--:|"]
    for name, entry in entries.items():
        if chapter := chapters.get(int(name[:2])):
            lines.append(f"| **{chapter}** |" + " |" * (len(columns) - 1))
        before = [
            f"[{n}]({each}.ipynb)" for n in entry.read_before for each in entries if each[:2] == n
        ]
        rows = run_counts(name[3:], machine).total()
        cells = [
            f"[{name[:2]} · {name[3:].replace('_', '_<wbr>')}]({name}.ipynb)",  # long names may be broken
            "both" if len(entry.editions) > 1 else "".join(entry.editions),
            in_short(entry.question),
            ", ".join(before),
            ", ".join(entry.minutes),
            f"{rows:,}" if rows else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def in_short(question: str) -> str:
    """The first sentence that asks something in more than a word or two; without one, the first sentence."""
    sentences = re.split(r"(?<=[.?!]) (?=[A-Z`])", question)
    asking = [each for each in sentences if each.endswith("?") and len(each.split()) > 3]
    first = [*asking, *sentences][0].removeprefix("(a) ")
    return re.split(r"(?<=\?) (?=\([a-z]\) )", first)[0]  # without the parts that follow


def show_headline(entry: Entry) -> None:
    """Display what a notebook found: question, picture, answer. Nothing where there is no answer yet."""
    if not entry.headline:
        return
    asked = f"### [{entry.name[:2]} · {entry.name[3:]}]({entry.name}.ipynb)\n\n*{entry.question}*"
    display.display(display.Markdown(asked))
    if entry.picture:
        small = Image.open(io.BytesIO(base64.b64decode(entry.picture.data["image/png"]))).convert(
            "RGB"
        )
        small.thumbnail((_WIDTH, small.height), Image.Resampling.LANCZOS, reducing_gap=None)
        # Of Pillow's ways the one that keeps the colour of a thin line; the others give two lines one colour.
        few, buffer = (
            small.quantize(_COLORS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=0),
            io.BytesIO(),
        )
        few.save(buffer, "png", optimize=True)
        bundle = {"image/png": buffer.getvalue(), "text/plain": "<figure>"}
        shown = entry.picture.metadata.get("image/png", {}) | {"width": _SHOWN_WIDTH}
        display.display(bundle, raw=True, metadata={"image/png": shown})
    display.display(display.Markdown(entry.headline))
