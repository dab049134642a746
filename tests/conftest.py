"""What every test file shares: a figures folder, the GPU marker, no deadlines, a way to write notebooks."""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch
from hypothesis import settings
from nbformat import v4
from tests.labbook import kernel_forks

import cs336_systems  # noqa: F401  chooses Triton's interpreter, before a module of torch's imports triton
from cs336_systems.parallel.launch import _PRELOADED
from labbook.machine import memory_bytes

# Imports take longer than most of what ranks do, and no module is edited while its tests run.
_PRELOADED += ["cs336_systems.checks", "cs336_systems.training", "labbook.plots", "torch._dynamo"]
_PRELOADED += ["hypothesis", "pytest", "triton.experimental.gluon.nvidia.hopper"]
kernel_forks.install()

# On a busy machine any example may be slow.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")


def pytest_configure() -> None:
    """Let a test that takes more than 60 % of the machine's memory fail by its name, not end its worker."""
    if (
        sys.platform == "linux" and not torch.cuda.is_available()
    ):  # CUDA reserves addresses by the terabyte
        limit, allowed = memory_bytes() * 6 // 10, resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)
        resource.setrlimit(resource.RLIMIT_AS, (limit, allowed))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no GPU, and `gpu(n)` where there are fewer than n."""
    seen = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = (marker.args or (1,))[0] if marker else 0
        if seen < needed:
            wanted = "a CUDA GPU" if needed == 1 else f"{needed} CUDA GPUs"
            item.add_marker(
                pytest.mark.skip(reason=f"needs {wanted}, and torch sees {seen or 'none'} here")
            )


@pytest.fixture(autouse=True, scope="session")
def _scratch_figures(tmp_path_factory: pytest.TempPathFactory):
    """Whatever a test measures stays out of the repository's figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABBOOK_FIGURES", str(tmp_path_factory.mktemp("figures")))
        yield


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory a tensor starts from, nothing of it may be left: here all new floats start as NaN."""
    from torch.utils._device import _device_constructors

    from cs336_systems.attention import flash_triton
    from cs336_systems.kernels.runtime import guards

    _device_constructors()  # `with torch.device(...)` keeps which functions it finds at its first use

    def poisoned(make):
        def make_poisoned(*arguments, **options):
            x = make(*arguments, **options)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return make_poisoned

    makers = {torch: "empty empty_like", torch.Tensor: "new_empty new_empty_strided"}
    makers[guards] = "_empty_strided_cpu _empty_strided_cuda"
    for owner, names in makers.items():
        for name in names.split():
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    monkeypatch.setattr(
        flash_triton, "_forwards", {}
    )  # what is prepared already knows how to make tensors
    monkeypatch.setattr(flash_triton, "_backwards", {})


PARAMETERS = """\
model_size = "tiny"  # size of the model
edition = 2025  # edition of the assignment
# lengths of the sequences
context_lengths = [32, 64]
dtypes = ["float32"]  # numbers
steps = 3  # measured steps
rate = 0.5  # any number
device = "auto"  # where to run
"""


@pytest.fixture
def write_notebook() -> Callable[..., Path]:
    """write_notebook(path, *code, parameters=...): not executed; a cell "## Results" is a heading."""

    def write(path: Path, *code: str, parameters: str = PARAMETERS) -> Path:
        cells = [v4.new_markdown_cell("# A notebook\n\n$a^2 + b^2$")]
        cells.append(v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
        sections = {"## Results": v4.new_markdown_cell("## Results")}
        cells += [sections.get(source) or v4.new_code_cell(source) for source in code]
        nbformat.write(v4.new_notebook(cells=cells), path)
        return path

    return write
