"""Which kernels compute an attention, with which tiles and splits: one pure function of sizes and GPU."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from cs336_systems.attention.tiles import (
    BF16X3_KERNELS,
    BF16X3_LENGTH,
    HOPPER_BACKWARD_LENGTH,
    ONE_LAUNCH,
    OWN_KEYS,
    PERSISTENT_HEADS,
    PROGRAMS_PER_SM,
    SHORT_LENGTH,
    WARP_GROUP_ROWS,
    Tile,
    Tuning,
)

REGISTERS = 2**16  # of an SM


class Problem(NamedTuple):
    """One pass of one attention: q (batch, heads, n_queries, d), k and v (batch, heads, n_keys, d)."""

    batch: int
    heads: int
    n_queries: int
    n_keys: int
    is_causal: bool
    backward: bool = False
    deterministic: bool = False  # the same bits every time


@dataclass(frozen=True)
class Plan:
    """tiles: of the kernels that run, in this order. With more than one split their loops are split into
    split_size rows each. programs: of each kernel; persistent ones take several of `work_tiles` tiles."""

    tiles: dict[str, Tile]
    programs: dict[str, int]
    splits: int = 1
    split_size: int = 0
    work_tiles: int = 0  # of "hopper_forward"
    persistent: bool = False


def choose(problem: Problem, tuning: Tuning, kernels: tuple[str, ...] = ()) -> Plan:
    """The plan for a problem on the GPU that the tuning is for; with other kernels than it would choose."""
    kernels = kernels or _kernels(problem, tuning)
    tiles = {kernel: _tile(problem, tuning, kernel) for kernel in kernels}
    programs = {kernel: _programs(problem, kernel, tile) for kernel, tile in tiles.items()}
    # All kernels of a pass are split as the last one: one more kernel merges what all of them write.
    plan = Plan(tiles, programs, *_splits(problem, tuning, kernels[-1]))
    return _persistent(problem, tuning, plan) if "hopper_forward" in kernels else plan


def _kernels(problem: Problem, tuning: Tuning) -> tuple[str, ...]:
    """The first of its pass that runs, of those that the tuning has tiles for:

    forward     bf16x3_forward | hopper_forward, unless forward would split its loop | forward
    backward    bf16x3_dq, bf16x3_dkdv | hopper_backward
                | backward, if its loop is split or its programs are few and make scores at once | dq, dkdv
    """
    bf16x3 = _bf16x3_runs(problem, tuning)
    if not problem.backward:
        if bf16x3:
            return ("bf16x3_forward",)
        split = _splits(problem, tuning, "forward")[0] > 1
        return (
            ("hopper_forward",) if "hopper_forward" in tuning.tiles and not split else ("forward",)
        )
    if bf16x3:
        return "bf16x3_dq", "bf16x3_dkdv"
    if _hopper_backward_runs(problem, tuning):
        return ("hopper_backward",)
    if "backward" in tuning.tiles:
        tile = _tile(problem, tuning, "backward")
        few = _programs(problem, "backward", tile) <= ONE_LAUNCH[tuning.precision] * tuning.sm_count
        # Unsplit, two launches of small tiles take less time than one of tiles that make scores in chunks.
        if _splits(problem, tuning, "backward")[0] > 1 or (few and not tile.chunk):
            return ("backward",)
    return "dq", "dkdv"


def _persistent(problem: Problem, tuning: Tuning, plan: Plan) -> Plan:
    """Of "hopper_forward", its plan's only kernel: as many programs as run at once, where that gains.

    Of 16 causal heads of 128 and 4,096 tokens 132 SMs have 132 programs, for 512 work tiles.
    """
    (tile,), (work_tiles,) = plan.tiles.values(), plan.programs.values()
    at_once = _programs_at_once(tuning, tile)
    # Three consumers have no registers left for a mask by keys alone that lasts from one tile to the next.
    spills = (
        tile.block_m == 3 * WARP_GROUP_ROWS
        and not problem.is_causal
        and problem.n_keys % tile.block_n
    )
    gains = (tuning.block_d >= PERSISTENT_HEADS and not spills) or _is_short(problem, tuning)
    persistent = work_tiles > at_once and gains
    programs = {"hopper_forward": at_once if persistent else work_tiles}
    return replace(plan, programs=programs, work_tiles=work_tiles, persistent=bool(persistent))


def _bf16x3_runs(problem: Problem, tuning: Tuning) -> bool:
    """Whether BF16X3_KERNELS do, all or none: backward has to round scores as forward did.

    So both passes ask about the forward's programs, the fewest of the three if keys are as many as queries.
    """
    if not tuning.tiles.keys() >= set(BF16X3_KERNELS):
        return False
    long = min(problem.n_queries, problem.n_keys) >= BF16X3_LENGTH[tuning.block_d]
    return long and _fills_gpu(
        problem, tuning, "bf16x3_forward", _tile(problem, tuning, "bf16x3_forward")
    )


def _hopper_backward_runs(problem: Problem, tuning: Tuning) -> bool:
    """It adds dQ up in any order, and its programs are large: where they are fewer than the SMs, smaller ones
    keep more of them at work; where sequences are short, these take longer to begin and to end."""
    kernel = "hopper_backward"
    if kernel not in tuning.tiles or problem.deterministic:
        return False
    length = HOPPER_BACKWARD_LENGTH[tuning.block_d][problem.is_causal]
    return problem.n_queries > length and _fills_gpu(
        problem, tuning, kernel, _tile(problem, tuning, kernel)
    )


def _tile(problem: Problem, tuning: Tuning, kernel: str) -> Tile:
    """That of short sequences, or the first that makes programs enough; the last where none does."""
    if kernel == "hopper_forward" and _is_short(problem, tuning):
        return tuning.short
    *larger, last = tuning.tiles[kernel]
    for tile in larger:
        unequal = problem.is_causal and tile.max_registers  # programs that share an SM
        if _fills_gpu(problem, tuning, kernel, tile) and not unequal:
            return tile
    return last


def _is_short(problem: Problem, tuning: Tuning) -> bool:
    """Whether sequences are short, and many: see SHORT_LENGTH."""
    longest = SHORT_LENGTH if problem.is_causal else SHORT_LENGTH // 4
    if tuning.short is None or problem.n_keys > longest:
        return False
    enough = PROGRAMS_PER_SM["hopper_forward"] * _programs_at_once(tuning, tuning.short)
    return _programs(problem, "hopper_forward", tuning.short) >= enough


def _programs_at_once(tuning: Tuning, tile: Tile) -> int:
    """How many of Hopper's programs, of eight warps or more, the GPU has registers for."""
    # Of a program: one consumer's four warps, and a producer that counts as four, of 32 threads each.
    each = 8 * 32 * tile.max_registers if tile.max_registers else REGISTERS
    return REGISTERS // each * tuning.sm_count


def _programs(problem: Problem, kernel: str, tile: Tile) -> int:
    """One for each tile of what a program owns: of OWN_KEYS keys, of others queries; "backward" has both."""
    queries, keys = cdiv(problem.n_queries, tile.block_m), cdiv(problem.n_keys, tile.block_n)
    owned = queries + keys if kernel == "backward" else keys if kernel in OWN_KEYS else queries
    return owned * problem.batch * problem.heads


def _fills_gpu(problem: Problem, tuning: Tuning, kernel: str, tile: Tile) -> bool:
    programs = _programs(problem, kernel, tile) * _most_splits(problem, tuning, kernel)
    return programs >= PROGRAMS_PER_SM.get(kernel, 1) * tuning.sm_count


def _splits(problem: Problem, tuning: Tuning, kernel: str) -> tuple[int, int]:
    """(splits, rows of each): see SplitLimits. (1, 0) if the loop is not split.

    "forward" of one head of 64 in bfloat16, 4,096 tokens, on 132 SMs: 64 programs loop over 4,096 keys. There
    can be 4096 // 256 = 16 splits. `many` allows 4 * 132 // 64 = 8, `long` 4096 * 132 // (2048 * 64) = 4,
    `most` 4: 4 splits of 1,024 keys.
    """
    possible = _most_splits(problem, tuning, kernel)
    if possible == 1:
        return 1, 0
    limits, sms, tile = tuning.splits[kernel], tuning.sm_count, _tile(problem, tuning, kernel)
    rows, programs = _loop_rows(problem, kernel), _programs(problem, kernel, tile)
    useful = min(limits.many * sms // programs, rows * sms // (limits.long * programs))
    splits = min(possible, limits.most, max(limits.few * sms // programs, useful))
    if splits < 2:
        return 1, 0
    unit = max(tile.block_m, tile.block_n)  # no tile lies in two splits
    size = cdiv(cdiv(rows, splits), unit) * unit
    return cdiv(rows, size), size


def _most_splits(problem: Problem, tuning: Tuning, kernel: str) -> int:
    """How many splits of `shortest` rows there can be; 1 if fewer than four, or without limits."""
    limits = tuning.splits.get(kernel)
    splits = _loop_rows(problem, kernel) // limits.shortest if limits else 1
    return splits if splits >= 4 else 1


def _loop_rows(problem: Problem, kernel: str) -> int:
    """How many rows a program can loop over: keys, or in a backward pass whichever are more."""
    return problem.n_keys if kernel.endswith("forward") else max(problem.n_queries, problem.n_keys)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
