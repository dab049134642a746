"""The problems of the handout, in both editions: the only place where they are listed."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

START = "00_start_here"  # the map: no problem of its own, so no title and sections of one


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


# Chapter, number of its first notebook, and its problems in their order with their editions.
_HANDOUT = """
Profiling and benchmarking | 11 | benchmarking_script both, nsys_profile both
  mixed_precision_accumulation both, benchmarking_mixed_precision both, memory_profiling both
Single-GPU memory | 16 | gradient_checkpointing 2026
Attention kernels | 21 | pytorch_attention both, torch_compile both, weighted_sum both, flash_forward both
  flash_backward both, flash_benchmarking both, flash_leaderboard 2025
Data parallel | 31 | distributed_communication_single_node both, naive_ddp both, naive_ddp_benchmarking both
  minimal_ddp_flat_benchmarking both, ddp_overlap_individual_parameters both
  ddp_overlap_individual_parameters_benchmarking both, ddp_overlap_bucketed 2025
  ddp_bucketed_benchmarking 2025
Sharding | 41 | optimizer_state_sharding both, optimizer_state_sharding_accounting both, fsdp 2026
  fsdp_accounting 2026
Scaling on paper | 51 | communication_accounting 2025, alternate_ring_all_reduce 2026
  data_parallel_calcs 2026, fsdp_calcs 2026, tp_calcs 2026, fsdp_tp_calcs 2026
Leaderboard | 61 | leaderboard 2026
"""


def _problems() -> Iterator[Problem]:
    for line in _HANDOUT.strip().replace("\n  ", ", ").splitlines():
        chapter, first, listed = line.split(" | ")
        for number, entry in enumerate(listed.split(", "), start=int(first)):
            slug, edition = entry.split()
            yield Problem(number, slug, (2025, 2026) if edition == "both" else (int(edition),), chapter)


PROBLEMS = tuple(_problems())

_NEED_TRITON = (*range(23, 28), 61)  # attention's kernels and leaderboard, and that of a full step


def why_not_here(notebook: str) -> str:
    """Why the notebook of this name cannot run on this machine; empty when it can."""
    number, _, _ = notebook.partition("_")
    if number.isdigit() and int(number) in _NEED_TRITON and find_spec("triton") is None:
        return "needs triton, which is not installed here; there is none for macOS"
    return ""
