"""The problems of the handout, in both editions: the only place where they are listed."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

START = "00_start_here"  # the map: no problem of its own, so no title and sections of one
_BOTH, _2025, _2026 = (2025, 2026), (2025,), (2026,)


@dataclass(frozen=True)
class Problem:
    """A problem of the handout, and the number of its notebook: the chapter and the place in it."""

    number: int
    slug: str
    editions: tuple[int, ...]
    chapter: str

    @property
    def name(self) -> str:
        """Name of the notebook, without `.ipynb`."""
        return f"{self.number}_{self.slug}"

    @property
    def title(self) -> str:
        return f"{self.number} · {self.slug}"


def _chapter(title: str, first: int, **editions: tuple[int, ...]) -> Iterator[Problem]:
    """Problems numbered from `first`, in their order."""
    for number, (slug, years) in enumerate(editions.items(), start=first):
        yield Problem(number, slug, years, title)


PROBLEMS = (
    *_chapter(
        "Profiling and benchmarking", 11,
        benchmarking_script=_BOTH,
        nsys_profile=_BOTH,
        mixed_precision_accumulation=_BOTH,
        benchmarking_mixed_precision=_BOTH,
        memory_profiling=_BOTH,
    ),
    *_chapter("Single-GPU memory", 16, gradient_checkpointing=_2026),
    *_chapter(
        "Attention kernels", 21,
        pytorch_attention=_BOTH,
        torch_compile=_BOTH,
        weighted_sum=_BOTH,
        flash_forward=_BOTH,
        flash_backward=_BOTH,
        flash_benchmarking=_BOTH,
        flash_leaderboard=_2025,
    ),
    *_chapter(
        "Data parallel", 31,
        distributed_communication_single_node=_BOTH,
        naive_ddp=_BOTH,
        naive_ddp_benchmarking=_BOTH,
        minimal_ddp_flat_benchmarking=_BOTH,
        ddp_overlap_individual_parameters=_BOTH,
        ddp_overlap_individual_parameters_benchmarking=_BOTH,
        ddp_overlap_bucketed=_2025,
        ddp_bucketed_benchmarking=_2025,
    ),
    *_chapter(
        "Sharding", 41,
        optimizer_state_sharding=_BOTH,
        optimizer_state_sharding_accounting=_BOTH,
        fsdp=_2026,
        fsdp_accounting=_2026,
    ),
    *_chapter(
        "Scaling on paper", 51,
        communication_accounting=_2025,
        alternate_ring_all_reduce=_2026,
        data_parallel_calcs=_2026,
        fsdp_calcs=_2026,
        tp_calcs=_2026,
        fsdp_tp_calcs=_2026,
    ),
    *_chapter("Leaderboard", 61, leaderboard=_2026),
)  # fmt: skip

_NEED_TRITON = range(23, 28)  # from the first Triton kernel to the leaderboard of kernels


def why_not_here(notebook: str) -> str:
    """Why the notebook of this name cannot run on this machine; empty when it can."""
    number, _, _ = notebook.partition("_")
    if number.isdigit() and int(number) in _NEED_TRITON and find_spec("triton") is None:
        return "needs triton, which is not installed here; there is none for macOS"
    return ""
