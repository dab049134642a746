"""The workbook's commands: run it, list its notebooks, renew them, copies to learn from."""

import os
import signal
import sys
from argparse import ArgumentParser
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import numpy as np
import torch

from labbook import release
from labbook.book import batch, notebooks, site, slurm
from labbook.book.map import put_in_short
from labbook.book.tidy import tidy, write_copies
from labbook.files import figures_dir, make_folder, write_atomically
from labbook.machine import core_count, machine_card
from labbook.project import configure, project
from labbook.timing import one_line


def main(arguments: list[str] | None = None, program: str | None = None) -> int:
    """Exit code: 0 all well, 1 a notebook failed, 2 refused before starting, 130 interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's way of saying Ctrl-C
    try:
        configure(project().root)  # notebooks run in another folder
        os.environ["LABBOOK_FIGURES"] = str(figures_dir().resolve())
        options = _parser(program).parse_args(arguments)
        return options.command(options) or 0
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        # A full disk is told once for each file of a site.
        print(f"error: {error}"[:2000], file=sys.stderr)
        return 2


def _parser(program):
    parser = ArgumentParser(prog=program, description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    parsers = {}
    # A function's name is its command's, and its docstring the help.
    for function in (_run, _list, _notebooks, _figures, _learn, _site, _release, _release_check):
        name = function.__name__.removeprefix("_").replace("_", "-")
        parsers[name] = commands.add_parser(
            name, help=function.__doc__, description=function.__doc__
        )
        parsers[name].set_defaults(command=function)
    _add_run_options(parsers["run"])
    parsers["site"].add_argument("folder", nargs="?", type=Path, help="of a run: runs/<machine>")
    parsers["release"].add_argument("name", help="v1.0")
    parsers["release"].add_argument("commit", nargs="?", help="default: as runs say")
    for name in ("notebooks", "figures", "learn"):
        parsers[name].add_argument("names", nargs="*", metavar="NOTEBOOK", help="default: all")
    return parser


def _add_run_options(parser):
    add = parser.add_argument
    add("--profile", choices=batch.PROFILES, help="default: what this machine has")
    add("--only", nargs="+", default=[], metavar="NOTEBOOK", help="number, slug or name")
    add("-p", action="append", default=[], metavar="NAME=VALUE", help="where a notebook has it")
    add("--force", action="store_true", help="execute also what is done and unchanged")
    add("--remeasure-card", action="store_true", help="measure the rates of this machine again")
    add("--cluster", choices=["slurm"], help="submit, and wait; SBATCH_PARTITION etc. as usual")
    add("--job", metavar="NAME", help="one job alone, by the name of its files")
    add("--dry-run", action="store_true", help="print what would be executed, and for how long")
    add("--output", type=Path, default=project().root / "runs", help="default: runs")


def _run(options):
    """execute the notebooks that batch.yaml asks of this machine, where they are not done and unchanged"""
    gpus = torch.cuda.device_count()
    possible = [name for name, needed in batch.PROFILES.items() if needed <= gpus]
    profile = options.profile or possible[-1]
    needed = batch.PROFILES[profile]
    jobs = batch.jobs(profile, only=options.only, overrides=options.p)
    # A cell that measures waits until no other uses what it measures: book/kernel.py.
    at_once = min(4, 1 + core_count() // 4) if needed else min(2, core_count())
    if options.dry_run:
        return _print_plan(jobs, at_once)
    if options.cluster and not options.job:
        return _run_on_slurm(jobs, profile, options)
    if options.job:
        by_name = {job.name: job for job in jobs}
        if options.job not in by_name:
            raise notebooks.BatchError(notebooks.unknown("job", options.job, by_name))
        jobs = [by_name[options.job]]
        needed = min(needed, 1)  # Slurm gives it as many as it has ranks
    if gpus < needed:
        raise notebooks.BatchError(f"profile {profile!r} needs {needed} GPUs, here: {gpus}")
    return _run_here(jobs, needed, at_once, options)


def _print_plan(jobs, at_once):
    seconds = [batch.estimated_s(job, at_once) for job in jobs]
    for job, job_s in zip(jobs, seconds, strict=True):
        estimate = f"{job_s:6.0f} s".replace("nan", "  ?")
        print(f"{estimate}  {job.notebook.stem} {job.line()}")
    print(f"{np.nansum(seconds):6.0f} s  for those that are known")


def _run_here(jobs, gpus, at_once, options):
    """Execute jobs for so many GPUs on this machine; the exit code."""
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the notebooks inherit it
    # In a process of its own: one that has touched CUDA holds GPU memory until it ends.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        if gpus > 1:  # processes that share GPUs have a card of their own
            pool.submit(machine_card, several=True, anew=options.remeasure_card).result()
        card = pool.submit(machine_card, anew=options.remeasure_card).result()
    print(card.line())
    make_folder(figures_dir() / card.slug)  # what cannot be kept is not measured
    folder = options.output.resolve() / card.slug
    if options.force:
        os.environ["LABBOOK_AGAIN"] = "1"  # for the rows, too
    outcomes = batch.run_batch(jobs, folder, force=options.force, at_once=at_once)
    # The site of all jobs is made by the command that waits for them.
    return _report(outcomes, [] if options.job else [folder])


def _run_on_slurm(jobs, profile, options):
    """Each job by this very command, wherever it is executed."""
    output = options.output.resolve()
    command = [sys.executable] + sys.orig_argv[1:]
    command += [f"--profile={profile}", f"--output={output}", "--job"]
    gpu = batch.PROFILES[profile] > 0
    outcomes = slurm.run_on_slurm(jobs, command, output, gpu=gpu, force=options.force)
    return _report(outcomes, sorted({path.parent for path in output.glob("*/*.ipynb")}))


def _report(outcomes, folders):
    """Print how each ended, and where the site of each folder is; the exit code."""
    print(f"\n{batch.summary(outcomes)}\n")
    for folder in folders:
        try:
            print(site.build(folder, folder))
        except Exception as error:  # whatever Sphinx, its extensions or the disk lack
            print(
                f"warning: {folder}/index.html cannot be made: {one_line(error)}", file=sys.stderr
            )
    return _any_failed(outcomes)


def _any_failed(outcomes):
    return any(outcome.status == "error" for outcome in outcomes)


def _list(options):
    """the notebooks, their parameters and defaults"""
    for name, parameters in notebooks.load_notebooks().items():
        print(name)
        for parameter in parameters.values():
            print(f"    {parameter.name} = {parameter.default!r}  # {parameter.help}")


def _notebooks(options):
    """execute notebooks in place, on the CPU, as they are committed"""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    names = options.names
    if names:  # those that show what the others found show what these found
        names += notebooks.book("last")
    with TemporaryDirectory() as scratch:
        os.environ["LABBOOK_FIGURES"] = scratch  # outputs show committed rows and this run alone
        return _any_failed([_renew(path) for path in _paths(names)])


def _figures(options):
    """redraw the plots of notebooks from the rows, whatever measured them"""
    jobs = [batch.Job(path) for path in _paths(options.names)]
    with TemporaryDirectory() as folder:
        return _any_failed(batch.run_batch(jobs, Path(folder)))


def _learn(options):
    """write the learner's copies, solutions cleared, to learn/"""
    print(*write_copies(_paths(options.names), project().root / "learn"), sep="\n")


def _site(options):
    """the executed notebooks as a site in site/, to be read offline; or those of a run, in its folder"""
    target = options.folder or project().root / "site"
    print(site.build(target, options.folder or notebooks.folder()))


def _release(options):
    """write RELEASE, by which pages say with which code the committed rows were measured"""
    if _release_check(options):
        return 1
    release.write(options.name, options.commit)


def _release_check(options):
    """list the committed rows that are not of today's code, and what has changed since"""
    old = release.old_rows()
    print("\n".join(old or ["all committed rows are of today's code"]))
    return bool(old)


def _paths(words):
    """The notebooks that are meant, or all; those come last that show what the others found."""
    all_names = notebooks.load_notebooks()
    names = sorted(notebooks.resolve(words, all_names) or all_names, key=notebooks.is_last)
    return [notebooks.folder() / f"{name}.ipynb" for name in names]


def _renew(path):
    """Execute a notebook with its defaults, and put it, tidy, in its own place if it went well."""
    with TemporaryDirectory() as folder:
        (outcome,) = batch.run_batch([batch.Job(path)], Path(folder))
        if outcome.status == "ok":
            notebook = tidy(notebooks.read(Path(folder) / path.name))
            put_in_short(notebook, path.stem)
            write_atomically(path, nbformat.writes(notebook) + "\n")
    return outcome
