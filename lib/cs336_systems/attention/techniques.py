"""The optimisation ladder: from a first version of the kernels to the last, a technique at a time.

Every technique has a prediction, made before it was measured. What was tried and not kept is here too.
"""

from dataclasses import dataclass, replace

from cs336_systems.attention.config import Tile
from cs336_systems.attention.variants import (
    DELTA_BEFOREHAND,
    DEPENDENT_LAUNCH,
    DV_BEFORE_DK,
    FUSED_BY_ATOMICS,
    FUSED_BY_COPY_ENGINE,
    HALF_POLYNOMIAL,
    HEADS_SIDE_BY_SIDE,
    MASK_EVERYWHERE,
    NATURAL_EXPONENTIALS,
    SHORT_ROWS_FIRST,
    WHOLE_MATRIX,
    Change,
)

FIRST_VERSION = "first version"
FIRST = {"forward": Tile(128, 64, 4, 3), "dq": Tile(128, 64, 8, 3), "dkdv": Tile(64, 128, 8, 3)}
LAST = {"forward": Tile(64, 128, 4, 3, 168), "dq": Tile(64, 64, 4, 3), "dkdv": Tile(64, 64, 4, 4)}


@dataclass(frozen=True)
class Step:
    """One technique. `undone` is what its lack looks like in the kernels' source, `added` what it would add.

    gain: the time before over the time after, predicted: from, to.
    """

    name: str
    gain: tuple[float, float]
    why: str
    undone: tuple[Change, ...] = ()
    added: tuple[Change, ...] = ()
    tiles: tuple[tuple[str, Tile], ...] = ()
    copy_engine: bool = False
    sums_dq: str = ""  # dK, dV and dQ in one kernel: how dQ is added up
    dependent_launch: bool = False  # the second kernel may start before the first has ended
    kept: bool = True


_SKIP = Step(
    "skip what is masked",
    (1.9, 2.0),
    "half of the scores lie above the diagonal",
    undone=WHOLE_MATRIX,
)
_MASK = Step(
    "mask on the diagonal only",
    (1.05, 1.10),
    "below the diagonal two comparisons and a selection a score are for nothing",
    undone=MASK_EVERYWHERE,
)
_POWERS = Step(
    "powers of two",
    (1.03, 1.10),
    "the scale and log2(e) in one multiply-add in front of the instruction that the hardware has",
    undone=NATURAL_EXPONENTIALS,
)
_ORDER = Step(
    "longest rows first",
    (1.03, 1.08),
    "short programs fill the gaps that long ones leave at the end",
    undone=SHORT_ROWS_FIRST,
)
_COPY = Step(
    "copy engine",
    (1.03, 1.08),
    "tensor descriptors: no addresses computed, no registers on the way to shared memory",
    copy_engine=True,
)
_SIDE_BY_SIDE = Step(
    "heads side by side",
    (1.0, 1.03),
    "the longest rows of all heads first: fewer gaps, but all heads' keys are more than the L2 cache holds",
    added=HEADS_SIDE_BY_SIDE,
    kept=False,
)
STEPS = {
    "forward": (
        _SKIP, _MASK, _POWERS, _ORDER, _COPY,
        Step(
            "tiles of 64 x 128",
            (1.0, 1.1),
            "half the queries, twice the keys: 155 registers a thread for 187, half the rescalings",
            tiles=(("forward", Tile(64, 128, 4, 3)),),
        ),
        Step(
            "at most 168 registers",
            (1.0, 1.02),
            "the compiler stays below them anyway, but may order instructions differently",
            tiles=(("forward", LAST["forward"]),),
        ),
        Step(
            "three programs an SM",
            (1.05, 1.15),
            "two stages take less shared memory: one program's softmax hides behind two others' products",
            tiles=(("forward", Tile(64, 128, 4, 2, 168)),),
            kept=False,
        ),
        _SIDE_BY_SIDE,
        Step(
            "half of the exponentials as polynomials",
            (1.0, 1.08),
            "multiply-adds have more units; at d = 64 exponentials take as long as the products",
            added=HALF_POLYNOMIAL,
            kept=False,
        ),
    ),
    "backward": (
        _SKIP, _MASK, _POWERS, _ORDER, _COPY,
        Step(
            "tiles of 64 x 64",
            (1.05, 1.2),
            "four warps and half the accumulators: two programs fit beside each other",
            tiles=(("dq", LAST["dq"]), ("dkdv", LAST["dkdv"])),
        ),
        Step(
            "dK before dV",
            (1.0, 1.03),
            "dS is ready while its product runs; P waits without harm",
            undone=DV_BEFORE_DK,
        ),
        Step(
            "D in the dQ kernel",
            (1.02, 1.05),
            "O and dO are at hand there; PyTorch needs passes of its own over both, and float32 copies",
            undone=DELTA_BEFOREHAND,
        ),
        Step(
            "three programs an SM",
            (1.05, 1.15),
            "two stages and at most 168 registers: one program's exponentials hide behind the others",
            tiles=(("dkdv", Tile(64, 64, 4, 2, 168)),),
            kept=False,
        ),
        _SIDE_BY_SIDE,
        Step(
            "dependent launch",
            (1.0, 1.01),
            "the second kernel is launched and has loaded K and V when the first ends: some 10 us",
            added=DEPENDENT_LAUNCH,
            dependent_launch=True,
            kept=False,
        ),
        Step(
            "one kernel, dQ by the copy engine",
            (1.2, 1.4),
            "five products and one exponential a score instead of seven and two; dQ is added up in L2",
            added=FUSED_BY_COPY_ENGINE,
            sums_dq="descriptor",
            kept=False,
        ),
        Step(
            "one kernel, dQ by atomic additions",
            (1.1, 1.3),
            "the same, each thread adding its own elements",
            added=FUSED_BY_ATOMICS,
            sums_dq="pointer",
            kept=False,
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Rung:
    """A version of the forward or of the backward: the kernels' source, and how they are launched."""

    name: str
    kernel: str
    changes: tuple[Change, ...]
    tiles: tuple[tuple[str, Tile], ...]
    copy_engine: bool = False
    sums_dq: str = ""
    dependent_launch: bool = False

    @property
    def own_delta(self) -> bool:
        """Whether the dQ kernel computes rowsum(dO * O) itself."""
        return not set(DELTA_BEFOREHAND) & set(self.changes)

    def after(self, step: Step) -> "Rung":
        """With one technique more."""
        left = tuple(change for change in self.changes if change not in step.undone)
        return replace(
            self,
            name=step.name,
            changes=left + step.added,
            tiles=tuple((dict(self.tiles) | dict(step.tiles)).items()),
            copy_engine=self.copy_engine or step.copy_engine,
            sums_dq=step.sums_dq,
            dependent_launch=step.dependent_launch,
        )


def rungs(kernel: str) -> list[Rung]:
    """From the first version up to the last; then what was tried on top of the last and not kept.

    Args:
        kernel: "forward" or "backward".
    """
    kept = [step for step in STEPS[kernel] if step.kept]
    lacking = tuple(change for step in kept for change in step.undone)
    climbed = [Rung(FIRST_VERSION, kernel, lacking, tuple(FIRST.items()))]
    for step in kept:
        climbed.append(climbed[-1].after(step))
    return climbed + [climbed[-1].after(step) for step in STEPS[kernel] if not step.kept]


def all_rungs(kernel: str) -> list[Rung]:
    """`rungs`, then what the library launches, whatever that is. A rung's place here is its number."""
    return [*rungs(kernel), Rung(SHIPPED[kernel].name, kernel, (), ())]


# The last rung: what the library launches, on Hopper a kernel of its own.
SHIPPED = {
    "forward": Step(
        "driven by hand",
        (1.1, 1.2),
        "in Gluon, on Hopper alone: P V of one tile is left running during the softmax of the next",
    ),
    "backward": Step(
        "as shipped",
        (1.3, 1.6),
        "on Hopper one kernel driven by hand, in Gluon: five products, no waiting for the additions of dQ",
    ),
}

# Ten techniques known to matter for attention on Hopper, each with the rungs that try it: (kernel, rung).
KNOWN: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "fused backward: five products, dQ added up in L2",
        (
            ("backward", "one kernel, dQ by the copy engine"),
            ("backward", "one kernel, dQ by atomic additions"),
            ("backward", SHIPPED["backward"].name),
        ),
    ),
    (
        "several programs beside each other on a processor",
        (
            ("forward", "tiles of 64 x 128"),
            ("forward", "at most 168 registers"),
            ("forward", "three programs an SM"),
            ("backward", "tiles of 64 x 64"),
            ("backward", "three programs an SM"),
        ),
    ),
    ("exponentials to the base 2", (("forward", "powers of two"), ("backward", "powers of two"))),
    (
        "loops with a mask and without",
        (("forward", "mask on the diagonal only"), ("backward", "mask on the diagonal only")),
    ),
    (
        "order of the programs",
        (
            ("forward", "longest rows first"),
            ("backward", "longest rows first"),
            ("forward", "heads side by side"),
            ("backward", "heads side by side"),
        ),
    ),
    ("order of the backward's products", (("backward", "dK before dV"),)),
    ("tensor descriptors", (("forward", "copy engine"), ("backward", "copy engine"))),
    (
        "delta on the way; dependent launch",
        (("backward", "D in the dQ kernel"), ("backward", "dependent launch")),
    ),
    (
        "asynchronous units driven by hand",
        (("forward", SHIPPED["forward"].name), ("backward", SHIPPED["backward"].name)),
    ),
    ("exponentials as polynomials", (("forward", "half of the exponentials as polynomials"),)),
)
