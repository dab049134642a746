"""Carrying out a batch: one process a notebook, a record of each on disk, a summary and an index."""

import html
import importlib.util
import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import tqdm

from labbook.book.batch import BatchError, Job
from labbook.book.execute import Outcome, execute
from labbook.book.pages import render
from labbook.book.problems import START, why_not_here
from labbook.files import figures_dir, make_folder, write_atomically
from labbook.fingerprint import fingerprint
from labbook.machine import MachineCard
from labbook.timing import one_line

_COLUMNS = ["notebook", "parameters", "status", "seconds", "host MiB", "GPU MiB"]
_INDEX = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>The workbook on {title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }}
th, td {{ border: none; border-bottom: 1px solid #ddd; padding: .35rem .75rem; text-align: left; }}
td:nth-child(n+4) {{ text-align: right; white-space: nowrap; }}
</style>
<h1>The workbook on {title}</h1>
<p>{subtitle}</p>
{table}
"""


@dataclass(frozen=True)
class Record:
    """How one job ended, as kept beside its executed notebook.

    `reason` says why of an error, or warns, of an executed notebook, that it has no page.
    """

    notebook: str
    parameters: dict[str, Any]
    fingerprint: str
    status: str
    reason: str
    seconds: float
    host_memory_mib: float
    gpu_memory_mib: float | None
    finished_at: str

    def fields(self) -> tuple[str, ...]:
        """The record as one line of the summary."""
        line = Job(Path(self.notebook), self.parameters).line()
        gpu = "" if self.gpu_memory_mib is None else f"{self.gpu_memory_mib:,.0f}"
        return (self.notebook, line, self.status, f"{self.seconds:.1f}", f"{self.host_memory_mib:,.0f}", gpu)


def run_batch(
    jobs: Sequence[Job], folder: Path, card: MachineCard, *, at_once: int = 1, force: bool = False
) -> list[Record]:
    """Execute jobs, leaving out what is done and unchanged; a failing notebook does not stop the others.

    Each ends as `<name>.ipynb`, `.html` and `.json` in the folder, whose index.html is renewed each time, so
    that a killed run continues where it was. Ctrl-C ends the running notebooks and raises KeyboardInterrupt.

    Args:
        jobs: from `batch.plan`.
        folder: of this machine, `runs/<machine>`.
        card: this machine's.
        at_once: notebooks at the same time; more than one disturbs their timings.
        force: execute also what is done.

    Returns:
        The record of every job, in the order of the jobs.

    Raises:
        BatchError: there is no Jupyter kernel to run on.
        PermissionError: the folder cannot be written to.
    """
    if importlib.util.find_spec("ipykernel") is None:
        raise BatchError(f"no Jupyter kernel: {sys.executable} lacks ipykernel; run: pip install ipykernel")
    make_folder(folder, "name one that can: --output FOLDER")
    records = {} if force else {job.name: record for job in jobs if (record := _done(job, folder))}
    left = [job for job in jobs if job.name not in records]
    stop = threading.Event()
    with (
        tqdm.tqdm(total=len(jobs), initial=len(records), unit="notebook", disable=None) as bar,
        ThreadPoolExecutor(at_once) as pool,
    ):
        try:
            pending = {pool.submit(_run_job, job, folder, card, stop): job.name for job in left}
            while pending:
                finished, _ = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
                for future in finished:
                    record = records[pending.pop(future)] = future.result()
                    name, line, *_ = record.fields()
                    bar.write(f"{record.status:5} {record.seconds:7.1f} s  {name} {line} {record.reason}")
                    bar.update()
                    index(folder, card.line())
                bar.set_postfix_str(" ".join(name for future, name in pending.items() if future.running()))
        finally:
            stop.set()  # on Ctrl-C what runs is killed and what waits ends at once; then the pool closes
    index(folder, card.line())
    return [records[job.name] for job in jobs]


def _run_job(job: Job, folder: Path, card: MachineCard, stop: threading.Event) -> Record | None:
    if stop.is_set():
        return None
    output, started = folder / f"{job.name}.ipynb", datetime.now(UTC)
    mark = _fingerprint(job)
    if reason := why_not_here(job.notebook.stem):
        outcome = Outcome("skipped", reason, 0.0, 0.0)
    else:
        outcome = execute(job.notebook, output, job.parameters, stop=stop)
    if outcome.status == "interrupted":
        return None
    warning = _make_page(output) if outcome.status != "skipped" and output.exists() else ""
    gpu = _gpu_memory_mib(card, started) if card.gpu != "none" else None
    record = Record(
        job.notebook.stem, job.parameters, mark, outcome.status, outcome.reason or warning,
        round(outcome.seconds, 1), round(outcome.peak_memory_mib), gpu,
        datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    _save_record(record, folder / f"{job.name}.json")
    return record


def _make_page(notebook: Path) -> str:
    """Make the page of an executed notebook; what comes back warns that it cannot be made, and why."""
    try:
        render(notebook)
    except Exception as error:  # whatever nbconvert, its templates or the disk lack
        notebook.with_suffix(".html").unlink(missing_ok=True)  # of an earlier execution
        return f"executed, but its page cannot be made: {one_line(error)}"
    return ""


def _save_record(record: Record, path: Path) -> None:
    write_atomically(path, json.dumps(asdict(record), indent=2) + "\n")


def _fingerprint(job: Job) -> str:
    return fingerprint(nbformat.read(job.notebook, as_version=4), job.parameters)


def _gpu_memory_mib(card: MachineCard, since: datetime) -> float | None:
    """The largest peak among the rows that were saved since; None when none has one."""
    peaks = []
    for path in (figures_dir() / card.slug).glob("*/*.csv"):
        if path.stat().st_mtime >= since.timestamp():
            with suppress(ValueError):  # whoever loads a damaged file says so
                rows = pd.read_csv(path).reindex(columns=["measured_at", "peak_memory_mib"])
                new = pd.to_datetime(rows["measured_at"], format="ISO8601") >= since
                peaks.append(float(rows.loc[new, "peak_memory_mib"].max()))
    peak = pd.Series(peaks, dtype=float).max()
    return None if pd.isna(peak) else float(peak)


def load_record(path: Path) -> Record | None:
    """The record in a file; None when it is not there or damaged, and its job runs again."""
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _done(job: Job, folder: Path) -> Record | None:
    if job.notebook.stem == START:  # shows what all others brought, and is never done
        return None
    path, notebook = folder / f"{job.name}.json", folder / f"{job.name}.ipynb"
    record = load_record(path)
    kept = record and record.status == "ok" and notebook.exists()
    if not kept or record.fingerprint != _fingerprint(job):
        return None
    if not notebook.with_suffix(".html").exists():  # what it lacked may be there now
        record = replace(record, reason=_make_page(notebook))
        _save_record(record, path)
    return record


def index(folder: Path, subtitle: str) -> None:
    """Write index.html: every executed notebook of the folder, with a link to its page."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        if record := load_record(path):
            line = dict(zip(_COLUMNS, map(html.escape, record.fields()), strict=True))
            page = path.with_suffix(".html")
            if page.exists():
                line["notebook"] = f'<a href="{html.escape(page.name)}">{line["notebook"]}</a>'
            if record.reason:
                line["status"] = f"<b>{line['status']}</b>: {html.escape(record.reason)}"
            lines.append(line)
    table = pd.DataFrame(lines, columns=_COLUMNS).to_html(index=False, escape=False, border=0)
    write_atomically(folder / "index.html", _INDEX.format(title=folder.name, subtitle=subtitle, table=table))


def summary(records: Sequence[Record]) -> str:
    """The records as a table of plain text, a failure's reason under its line."""
    table = pd.DataFrame([record.fields() for record in records], columns=_COLUMNS)
    texts = table.to_string(index=False, max_colwidth=60).splitlines()
    reasons = ["", *(record.reason for record in records)]
    return "\n".join(
        f"{text}\n    {reason}" if reason else text for text, reason in zip(texts, reasons, strict=True)
    )
