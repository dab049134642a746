"""The workbook at a glance: what each notebook asks, as its first cell says, and what it found.

What it found is the output of its cell tagged `headline`, an answer. The picture beside it is the one that
another cell with the tag shows, or else the first that the notebook shows of committed rows.
"""

import base64
import io
import re
from typing import NamedTuple

import nbformat
from IPython import display
from nbformat import NotebookNode
from PIL import Image

from labbook.answers import show_markdown
from labbook.book import notebooks
from labbook.book.tidy import HEADLINE, IN_SHORT

MARKS = ("*Handout problem", "**The question.**", "*Read before:*", "*Time:*")
# Of an answer: its name and its list of claims.
_AROUND = r"^\*\*\(.*?\)\*\* |\s*<details>.*"
_SHOWN_WIDTH = 600  # pixels on the page


class Entry(NamedTuple):
    """What the map tells of a notebook. The headline is empty when no executed answer has the tag.

    title: "13 · Adding up in 16 bits". read_before: numbers of other notebooks. minutes: to read it, and to
    work through it. picture: an output.
    """

    name: str
    title: str
    editions: list[str]
    question: str
    read_before: list[str]
    minutes: list[str]
    headline: str
    picture: NotebookNode | None


def read_map() -> dict[str, Entry]:
    """The notebooks there are, by name, without those that only show what the others found."""
    return {
        path.stem: read_entry(path.stem, notebooks.read(path))
        for path in notebooks.paths(notebooks.folder())
        if not notebooks.is_last(path.stem)
    }


def read_entry(name: str, notebook: NotebookNode) -> Entry:
    """What an executed notebook says of itself."""
    # Of a notebook that failed the first cell is papermill's.
    title = re.search("^# (.+)", "\n".join(cell.source for cell in notebook.cells), re.MULTILINE)
    if not title:
        raise ValueError(f"{name} has no first cell '# {name[:2]} · a title', and so is no chapter")
    handout, question, before, time = first_cell(notebook).values()  # as MARKS has them
    editions = re.findall(r"\b20\d\d\b", handout)
    read_before = re.findall(r"\b\d\d\b", re.sub(r"\(.*?\)", "", before))
    minutes = re.findall(r"\d+", time.replace("an hour", "60 minutes"))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tagged = [cell for cell in code if HEADLINE in notebooks.tags_of(cell)]
    drawn = tagged + [cell for cell in code if draws_committed_rows(cell.source)]
    picture = _first_shown(drawn, "image/png")
    headline = ""
    if answer := _first_shown(tagged, "text/markdown"):
        headline = re.sub(_AROUND, "", answer.data["text/markdown"], flags=re.DOTALL)
    return Entry(name, title[1], editions, question, read_before, minutes, headline, picture)


def draws_committed_rows(source: str) -> bool:
    return "page.figure" in source and "here=True" not in source


def _first_shown(cells, kind):
    """The first output of a kind."""
    outputs = [output for cell in cells for output in cell.outputs]
    return next((output for output in outputs if kind in output.get("data", {})), None)


def first_cell(notebook: NotebookNode) -> dict[str, str]:
    """What follows each of MARKS in the first cell, up to the next, "More:" or the end of the paragraph."""
    source = notebook.cells[0].source if notebook.cells else ""
    marks = "|".join(map(re.escape, MARKS))
    end = rf"(?=\n\s*\n|\s\*More:|\s(?:{marks})|$)"
    texts = {}
    for mark in MARKS:
        matches = re.findall(f"{re.escape(mark)}(.+?){end}", source, re.DOTALL)
        texts[mark] = " ".join("".join(matches[:1]).split())
    return texts


def put_in_short(notebook: NotebookNode, name: str) -> None:
    """Below its question, say the first sentence of what the notebook found, and show the picture of it."""
    entry = read_entry(name, notebook)
    notebook.cells = [cell for cell in notebook.cells if IN_SHORT not in notebooks.tags_of(cell)]
    if entry.headline and not notebooks.is_last(name):
        notebook.cells.insert(1, _in_short(entry))


def _in_short(entry):
    text = f"**In short.** {sentences(entry.headline)[0]}"
    cell = nbformat.v4.new_markdown_cell(text, id=IN_SHORT, metadata={"tags": [IN_SHORT]})
    if entry.picture:
        title = entry.picture.metadata.get("image/png", {}).get("alt", "")
        png = base64.b64encode(_small(entry.picture)).decode()
        cell.source += f"\n\n![{title}](attachment:{IN_SHORT}.png)"
        cell.attachments = {f"{IN_SHORT}.png": {"image/png": png}}
    return cell


def sentences(text: str) -> list[str]:
    """They end before a capital, a formula, a name in code or a parenthesis."""
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`*$(])", text)


def map_table(entries: dict[str, Entry]) -> str:
    """Every notebook by chapter, in Markdown: its question, what to read before, minutes."""
    # By the number of their first notebook.
    chapters = notebooks.book("chapters")
    links = {name[:2]: f"[{name[:2]}]({name}.ipynb)" for name in entries}
    lines = ["| notebook | edition | question | read before | minutes |", "|:--|:--|:--|:--|--:|"]
    for name, entry in entries.items():
        if chapter := chapters.get(int(name[:2])):
            lines.append(f"| **{chapter}** | | | | |")
        edition = "both" if len(entry.editions) > 1 else "".join(entry.editions)
        question = main_question(entry.question)
        before = ", ".join(links[number] for number in entry.read_before if number in links)
        minutes = ", ".join(entry.minutes)
        lines.append(
            f"| [{entry.title}]({name}.ipynb) | {edition} | {question} | {before} | {minutes} |"
        )
    return "\n".join(lines)


def main_question(text: str) -> str:
    """The first sentence that asks something in four words or more; without one, the first sentence."""
    parts = sentences(text.removeprefix("(a) "))
    return next((part for part in parts if part.endswith("?") and part.count(" ") > 2), parts[0])


def show_headline(entry: Entry) -> None:
    """Display what a notebook found: question, picture, answer. Nothing where there is no answer yet."""
    if not entry.headline:
        return
    show_markdown(f"### [{entry.title}]({entry.name}.ipynb)\n\n*{entry.question}*")
    if entry.picture:
        bundle = {"image/png": _small(entry.picture), "text/plain": "<figure>"}
        metadata = entry.picture.metadata.get("image/png", {}) | {"width": _SHOWN_WIDTH}
        display.display(bundle, raw=True, metadata={"image/png": metadata})
    show_markdown(entry.headline)


def _small(picture):
    """The PNG with fewer pixels and colours: enough to read it, and all stay below 1 MB together."""
    png = io.BytesIO(base64.b64decode(picture.data["image/png"]))
    image = Image.open(png).convert("RGB")
    image.thumbnail((800, image.height), Image.Resampling.LANCZOS, reducing_gap=None)
    # Of Pillow's ways the one that keeps the colour of a thin line; the others give two lines one colour.
    image = image.quantize(64, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=0)
    buffer = io.BytesIO()
    image.save(buffer, "png", optimize=True)
    return buffer.getvalue()
