"""What Hopper's two kernels share: tiles and barriers in shared memory, rings of them, tiles that TMA moves.

Buffers that are filled and read in turn are a ring. Each has two mbarriers, `ready` (or full) and `free`: who
fills it waits for free, who reads it for ready. A wait names the phase that must have ended; it flips with
every round of the ring (`next_in_ring`). Of two buffers:

    tile           0  1  2  3  4
    buffer         0  1  0  1  0
    who reads      0  0  1  1  0    waits for this phase of ready
    who fills      1  1  0  0  1    waits for this phase of free, `phase ^ 1`: at first for one that counts
                                    as ended, as all buffers are free
"""

import sys
from functools import cache

from triton import knobs
from triton._C.libtriton import ir
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@builtin
def _tma_add(dst, place, buffer, _semantic=None):
    """Have TMA add a tile in shared memory to one of dst."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, dst.handle, place, buffer.handle
    )


# What Gluon has renamed, under one name here. In 3.7:
block_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
# In 3.9; 3.8 knows both names.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# In 3.9.
_Buffers = gl.shared_memory_descriptor
reinterpret = getattr(_Buffers, "reinterpret", None) or _Buffers._reinterpret
# And what it has a function for since 3.8.
tma_add = getattr(tma, "async_atomic_add", None) or _tma_add


@cache
def has_registers_for_backward() -> bool:
    """Whether Triton's assembler has registers for hopper_backward; a sentence says it, once, if not.

    That of Triton 3.9, ptxas 13.4, spills 1.0 kB a thread for heads of 64, and for heads of 128 2.5 kB: there
    it also makes matmuls wait that are meant to run together. Those of 3.6 to 3.8, 12.8 and 12.9, spill at
    most 100 bytes. `compile_resources` prints what others make of it.
    """
    ptxas = get_ptxas(90)
    has = int(ptxas.version.partition(".")[0]) < 13
    if not has:
        print(
            f"hopper_backward does not run: ptxas {ptxas.version} spills its registers. dq and dkdv do, and "
            f"take longer; to have it: TRITON_PTXAS_BLACKWELL_PATH={knobs.nvidia.ptxas.path}",
            file=sys.stderr,
        )
    return has


# One wgmma of a consumer's four warps has 64 rows, 16 a warp: so many queries or keys a consumer owns.
MATMUL_ROWS = gl.constexpr(64)


@gluon.constexpr_function
def accumulator_layout(columns):
    """The registers of a matmul of 64 rows by four warps, 16 rows each."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def new_tiles(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """So many (ROWS, COLUMNS) tiles in shared memory, laid out as matmuls read them."""
    # Swizzled: eight rows of one column would lie in one bank, and be read one after the other.
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, COLUMNS], layout)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many mbarriers; a phase of each ends with ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def next_in_ring(index, phase, COUNT: gl.constexpr):
    """The place in a ring after this one, and the phase of its barriers."""
    last = index == COUNT - 1
    return gl.where(last, 0, index + 1), phase ^ last.to(gl.int32)


@gluon.jit
def load_by_tma(src, place, ready, buffers, index):
    """Have TMA fill one of the buffers: an arrival at its `ready`, whose phase ends with the last byte."""
    barrier = ready.index(index)
    mbarrier.expect(barrier, src.block_type.nbytes)
    async_load(src, place, barrier, buffers.index(index))


@gluon.jit
def store_by_tma(dst, place, buffer, value):
    """Have TMA store a tile from this buffer, which must not change before `tma.store_wait`."""
    buffer.store(value.to(buffer.dtype))
    # TMA reads shared memory by another way than threads write it, and would not see what they wrote.
    fence_async_shared()
    async_store(dst, place, buffer)
