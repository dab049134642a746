"""python -m cs336_systems: run the workbook, list its notebooks, redraw its figures."""

import argparse
import os
import signal
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import nbformat

from labbook.book import batch
from labbook.book.execute import execute
from labbook.book.problems import START, why_not_here
from labbook.book.tidy import tidy, write_copies
from labbook.files import figures_dir, make_folder, write_atomically
from labbook.machine import machine_card
from labbook.rows import RowError, compact, load_rows, save_rows


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 all well, 1 a notebook failed, 2 refused before starting, 130 interrupted."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's way of saying Ctrl-C
    if given := os.environ.get("CS336_FIGURES"):  # notebooks run in another folder
        os.environ["CS336_FIGURES"] = str(Path(given).resolve())
    try:
        return options.command(options)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads has seen enough: `list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return 0
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cs336_systems", description="The workbook's commands.")
    commands = parser.add_subparsers(required=True, metavar="command")
    run = _command(commands, _run, "run", "execute the notebooks that batch.yaml asks of this machine")
    run.add_argument("--profile", choices=batch.PROFILES, help="default: what this machine has")
    run.add_argument("--only", nargs="+", default=[], metavar="NOTEBOOK", help="number (11), slug or name")
    run.add_argument(
        "-p", action="append", default=[], metavar="NAME=VALUE", dest="overrides",
        help="a parameter, for every notebook that has it; the same name again makes a grid",
    )  # fmt: skip
    run.add_argument("--jobs", type=int, default=1, metavar="N", help="notebooks at once, without a GPU only")
    run.add_argument("--force", action="store_true", help="execute also what is done and unchanged")
    run.add_argument("--dry-run", action="store_true", help="print what would be executed")
    run.add_argument("--output", type=Path, default=batch.RUNS, metavar="FOLDER", help="default: runs")
    _command(commands, _list, "list", "the notebooks, their parameters and defaults")
    card = _command(commands, _card, "card", "this machine's card: what it is and was measured to do")
    card.add_argument("--refresh", action="store_true", help="measure again")
    for name, function, text in (
        ("notebooks", _notebooks, "execute notebooks in place, on the CPU, as they are committed"),
        ("figures", _figures, "redraw the plots of notebooks from the rows, whatever measured them"),
        ("learn", _learn, "write the learner's copies, solutions cleared, to learn/"),
    ):
        command = _command(commands, function, name, text)
        command.add_argument("names", nargs="*", metavar="NOTEBOOK", help="default: all")
    bench = _command(commands, _bench, "bench", "time the attention kernels against PyTorch's own")
    bench.add_argument("protocols", nargs="*", metavar="PROTOCOL", help="leaderboard, models, grid (all)")
    bench.add_argument(
        "--implementations", nargs="+", default=[], metavar="NAME", help="default: a protocol's own"
    )
    bench.add_argument("--force", action="store_true", help="measure also what is on record")
    compacting = _command(commands, _compact, "compact", "rewrite files of rows without what was replaced")
    compacting.add_argument("machine", nargs="?", help="default: this one")
    return parser


def _command(commands, function, name: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=function)
    return parser


def _run(options: argparse.Namespace) -> int:
    import torch

    gpus = torch.cuda.device_count()
    profile = options.profile or batch.PROFILES[min(gpus, 2)]
    jobs = batch.plan(profile, only=options.only, overrides=options.overrides)
    if options.dry_run:
        print("\n".join(f"{job.notebook.stem} {job.line()}" for job in jobs))
        return 0
    needed = batch.PROFILES.index(profile)
    if gpus < needed:
        allowed = ", ".join(batch.PROFILES[: gpus + 1])
        raise batch.BatchError(f"profile {profile!r} needs {needed} GPUs, here: {gpus}; allowed: {allowed}")
    if not needed and (asking := [job for job in jobs if job.parameters.get("device") == "cuda"]):
        raise batch.BatchError(f"{asking[0].notebook.stem}: device 'cuda' without a GPU; allowed: auto, cpu")
    if options.jobs < 1 or (options.jobs > 1 and needed):
        allowed = "1, for notebooks that share a GPU spoil each other's timings" if needed else "1 or more"
        raise batch.BatchError(f"--jobs {options.jobs}; allowed: {allowed}")
    if options.jobs > 1:
        print("note: notebooks that share the cores measure longer times than alone", file=sys.stderr)
    if not needed:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the notebooks inherit it
    return _run_jobs(jobs, options)


def _run_jobs(jobs: list[batch.Job], options: argparse.Namespace) -> int:
    from labbook.book import runs

    # In a process of its own: one that has touched CUDA holds GPU memory until it ends.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        card = pool.submit(machine_card).result()
    print(card.line())
    make_folder(figures_dir() / card.slug)  # what cannot be kept is not measured
    folder = options.output.resolve() / card.slug
    records = runs.run_batch(jobs, folder, card, at_once=options.jobs, force=options.force)
    print(f"\n{runs.summary(records)}\n\n{folder / 'index.html'}")
    return int(any(record.status not in ("ok", "skipped") for record in records))


def _list(options: argparse.Namespace) -> int:
    for name, parameters in batch.load_notebooks().items():
        print(name)
        for parameter in parameters.values():
            print(f"    {parameter.name} = {parameter.default!r}  # {parameter.comment}")
    return 0


def _card(options: argparse.Namespace) -> int:
    print(machine_card(refresh=options.refresh).line())
    return 0


def _notebooks(options: argparse.Namespace) -> int:
    """Rows and plots go to a scratch folder: outputs show the committed rows and this run, nothing else."""
    from labbook.book.map import renew_map

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["CS336_FIGURES"] = scratch
        code = _execute_defaults(options.names, in_place=True)
    renew_map()
    return code


def _figures(options: argparse.Namespace) -> int:
    return _execute_defaults(options.names, in_place=False)


def _learn(options: argparse.Namespace) -> int:
    known = batch.load_notebooks()
    names = batch.resolve(options.names, known) or list(known)
    paths = [batch.NOTEBOOKS / f"{name}.ipynb" for name in names]
    for line in write_copies(paths, batch.NOTEBOOKS.parent / "learn"):
        print(line)
    return 0


def _execute_defaults(words: list[str], *, in_place: bool) -> int:
    known = batch.load_notebooks()
    names = batch.resolve(words, known) or list(known)
    if in_place and START in known:  # it quotes the others' outputs
        names = [name for name in names if name != START] + [START]
    failed = 0
    for path in (batch.NOTEBOOKS / f"{name}.ipynb" for name in names):
        if reason := why_not_here(path.stem):
            print(f"skipped {path.stem}: {reason}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            executed = Path(folder) / path.name
            outcome = execute(path, executed, {})
            if in_place and outcome.status == "ok":
                tidied = tidy(nbformat.read(executed, as_version=4))
                write_atomically(path, nbformat.writes(tidied) + "\n")
        print(f"{outcome.status:5} {outcome.seconds:7.1f} s  {path.stem} {outcome.reason}", flush=True)
        failed += outcome.status != "ok"
    return int(failed > 0)


def _bench(options: argparse.Namespace) -> int:
    """Rows are saved as they come: an interrupted run continues."""
    from cs336_systems.bench import flash_sweep
    from labbook.page import row_lines

    protocols = options.protocols or list(flash_sweep.PROTOCOLS)
    plans = [(name, flash_sweep.protocol_cells(name, options.implementations)) for name in protocols]
    machine, failed, table = machine_card().slug, 0, "flash_times"
    for protocol, cells in plans:
        slug = flash_sweep.PROTOCOLS[protocol]
        known = load_rows(slug, machine, table)
        left = flash_sweep.missing(cells, known[:0] if options.force else known)
        print(f"{protocol}: {len(cells)} cells, {len(left)} of them to measure")
        for rows in flash_sweep.time_cells(left):
            try:
                save_rows(rows, slug, table, machine)
            except RowError as error:  # a pass faster than one inside it: something else had the machine
                print(error, file=sys.stderr)
                failed = 1
            print("\n".join(row_lines(rows, table)), flush=True)
        if len(known := load_rows(slug, machine, table)):
            print(f"\n{slug}: median ms (times ours)\n{flash_sweep.summary(known).to_string()}", flush=True)
    return failed


def _compact(options: argparse.Namespace) -> int:
    for path in compact(options.machine or machine_card().slug):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
