"""The kernels with one thing undone, or one thing added: what a technique is worth is the difference.

A `Change` replaces text in the kernels' own source. So a variant is the shipped kernel but for what the
change says, the shipped kernels carry no switches, and a change that no longer fits them is an error.
"""

import hashlib
import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

FORWARD, BACKWARD = "kernels_forward", "kernels_backward"


@dataclass(frozen=True)
class Change:
    """Text of one of the two files of kernels, and what stands there instead."""

    file: str
    old: str
    new: str
    times: int = 1  # how often the text is there

    def apply(self, source: str) -> str:
        """The changed source.

        Raises:
            ValueError: the text is not there as often as it should.
        """
        if (found := source.count(self.old)) != self.times:
            raise ValueError(f"{self.old!r} is {found} times in {self.file}; allowed: {self.times} times")
        return source.replace(self.old, self.new)


def kernels(changes: tuple[Change, ...]) -> dict[str, Any]:
    """The kernels "forward", "dq" and "dkdv" with these changes made."""
    forward = _module(FORWARD, tuple(change for change in changes if change.file == FORWARD))
    backward = _module(BACKWARD, tuple(change for change in changes if change.file == BACKWARD))
    return {
        "forward": forward.forward_kernel,
        "dq": backward.dq_kernel,
        "dkdv": backward.dkdv_kernel,
    }


def changed_source(file: str, changes: tuple[Change, ...]) -> str:
    """The source of one of the files of kernels with these changes made."""
    source = Path(__file__).with_name(f"{file}.py").read_text()
    for change in changes:
        source = change.apply(source)
    return source


@cache
def _folder() -> tempfile.TemporaryDirectory:
    """Where changed sources lie while this process runs: Triton reads a kernel's source from its file."""
    return tempfile.TemporaryDirectory(prefix="cs336_variants_")


@cache
def _module(file: str, changes: tuple[Change, ...]) -> ModuleType:
    source = changed_source(file, changes).replace("from .", f"from {__package__}.")
    name = f"{file}_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    path = Path(_folder().name) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Undone, one technique at a time, in both directions ...
WHOLE_MATRIX = (  # also what lies above the diagonal is computed, and masked away
    Change(FORWARD, "last_key = tl.minimum(n_keys, first_query + BLOCK_M)", "last_key = n_keys"),
    Change(BACKWARD, "last_key = tl.minimum(n_keys, first_query + BLOCK_M)", "last_key = n_keys"),
    Change(BACKWARD, "            first_key // BLOCK_M * BLOCK_M, tl.minimum(", "            0, tl.minimum("),
)
MASK_EVERYWHERE = (  # every tile compares positions, not only those on the diagonal
    Change(FORWARD, "unmasked = tl.minimum(unmasked, first_query // BLOCK_N * BLOCK_N)", "unmasked = 0"),
    Change(BACKWARD, "unmasked = tl.minimum(unmasked, first_query // BLOCK_N * BLOCK_N)", "unmasked = 0"),
    Change(
        BACKWARD, "unmasked = tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M", "unmasked = n_queries"
    ),
)
NATURAL_EXPONENTIALS = (  # scores scaled on their own, exp, log
    Change(
        FORWARD,
        """        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        correction = tl.exp2(m - m_new)
""",
        """        s = s * (scale_log2 * 0.6931471805599453)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        correction = tl.exp(m - m_new)
""",
    ),
    Change(FORWARD, "lse = (m + tl.log2(total)) * LN2", "lse = m + tl.log(total)"),
    Change(
        BACKWARD,
        "p = tl.exp2(s * scale_log2 - lse[:, None])",
        "p = tl.exp((s * scale_log2 - lse[:, None]) * 0.6931471805599453)",
    ),
    Change(
        BACKWARD,
        "pt = tl.exp2(st * scale_log2 - lse[None, :])",
        "pt = tl.exp((st * scale_log2 - lse[None, :]) * 0.6931471805599453)",
    ),
)
SHORT_ROWS_FIRST = (  # programs start in the order of their tiles
    Change(FORWARD, "tile = tiles - 1 - tile", "tile = tile"),
    Change(BACKWARD, "tile = tiles - 1 - tile", "tile = tile"),
    Change(
        BACKWARD,
        "first_key = tl.program_id(0) % tiles * BLOCK_N",
        "first_key = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_N",
    ),
)
DV_BEFORE_DK = (
    Change(BACKWARD, "        dv = tl.dot(pt.to(do.dtype), do, dv, input_precision=PRECISION)\n", ""),
    Change(
        BACKWARD,
        "        dst = (pt * (dpt - delta[None, :])).to(q.dtype)\n",
        """        dv = tl.dot(pt.to(do.dtype), do, dv, input_precision=PRECISION)
        dst = (pt * (dpt - delta[None, :])).to(q.dtype)
""",
    ),
)
DELTA_BEFOREHAND = (  # D comes from a pass of its own
    Change(
        BACKWARD,
        """    o_tile = _tile(o_ptr, batch, head, queries, dims, stride_ob, stride_oh, stride_on, stride_od)
    o = tl.load(o_tile, mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
""",
        "",
    ),
    Change(
        BACKWARD,
        "    tl.store(delta_ptr + rows, delta, mask=in_range)\n",
        "    delta = tl.load(delta_ptr + rows, mask=in_range, other=0.0)\n",
    ),
)

# ... and added: what was tried and is not in the shipped kernels.
HEADS_SIDE_BY_SIDE = tuple(  # the longest rows of all heads first, not one head after the other
    change
    for file, times in ((FORWARD, 1), (BACKWARD, 2))
    for change in (
        Change(
            file, "tl.program_id(0) % tiles", "(tl.program_id(0) // (tl.num_programs(0) // tiles))", times
        ),
        Change(
            file, "tl.program_id(0) // tiles\n", "tl.program_id(0) % (tl.num_programs(0) // tiles)\n", times
        ),
    )
)
HALF_POLYNOMIAL = (  # every other exponential by multiply-adds, which have units of their own (error 1e-4)
    Change(
        FORWARD,
        "@triton.jit\ndef _attend(",
        """@triton.jit
def _exp2(x):
    even, odd = tl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    odd = tl.maximum(odd, -126.0)
    whole = tl.floor(odd)
    part = odd - whole
    power = ((0.07802 * part + 0.22607) * part + 0.69583) * part + 0.99993
    bits = power.to(tl.int32, bitcast=True) + (whole.to(tl.int32) << 23)
    return tl.join(tl.exp2(even), bits.to(tl.float32, bitcast=True)).reshape(x.shape)


@triton.jit
def _attend(""",
    ),
    Change(
        FORWARD, "p = tl.exp2(s * scale_log2 - m_new[:, None])", "p = _exp2(s * scale_log2 - m_new[:, None])"
    ),
)
DEPENDENT_LAUNCH = (  # the second kernel starts while the first one's last programs run, and loads K and V
    Change(
        BACKWARD,
        """    tiles = tl.cdiv(n_queries, BLOCK_M)
    tile = tl.program_id(0) % tiles
""",
        """    tl.extra.cuda.gdc_launch_dependents()
    tiles = tl.cdiv(n_queries, BLOCK_M)
    tile = tl.program_id(0) % tiles
""",
    ),
    Change(
        BACKWARD,
        """    unmasked = 0
    if CAUSAL:  # the tiles""",
        """    tl.extra.cuda.gdc_wait()
    unmasked = 0
    if CAUSAL:  # the tiles""",
    ),
)
# dK, dV and dQ in one kernel: all programs add dQ^T = K^T dS^T up in float32; dq_kernel only prepares.
_FUSED = (
    Change(BACKWARD, "unmasked = tl.minimum(unmasked, first_query // BLOCK_N * BLOCK_N)", "unmasked = 0"),
    Change(BACKWARD, "last_key = tl.minimum(n_keys, first_query + BLOCK_M)", "last_key = 0"),
    Change(BACKWARD, "dk, dv, k, v, q_src", "dq_sum, batch_head, dk, dv, k, v, q_src", 3),
    Change(BACKWARD, "delta_ptr, dk_ptr, dv_ptr,\n", "delta_ptr, dk_ptr, dv_ptr, dq_sum,\n"),
)
_DST = "        dst = (pt * (dpt - delta[None, :])).to(q.dtype)\n"
FUSED_BY_ATOMICS = (
    *_FUSED,
    Change(
        BACKWARD,
        _DST,
        _DST
        + """        dqt = tl.dot(k.T, dst, input_precision=PRECISION)
        rows = batch_head.to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
        there = dq_sum + rows[:, None] * n_queries + queries[None, :]
        tl.atomic_add(there, dqt, mask=queries[None, :] < n_queries, sem="relaxed")
""",
    ),
)
FUSED_BY_COPY_ENGINE = (
    *_FUSED,
    Change(
        BACKWARD,
        _DST,
        _DST
        + """        dqt = tl.dot(k.T, dst, input_precision=PRECISION)
        dq_sum.atomic_add([batch_head * BLOCK_D, start], dqt)
""",
    ),
)
