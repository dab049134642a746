"""Kernel classes and short names, on names that real profiles contain."""

import sqlite3
from pathlib import Path

import pytest

from labbook.profiles.names import kernel_class, short_name
from labbook.profiles.torch_trace import read_trace
from labbook.project import project
from labbook.rows import published

SAMPLE = Path(__file__).parent / "data" / "sample.sqlite"
MUL = "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >"
NATIVE = "void at::native::(anonymous namespace)::"


def vectorized(functor: str) -> str:
    return f"void at::native::vectorized_elementwise_kernel<4, {functor}, std::array<char*, 2ul> >(int, ...)"


def reduce(op: str) -> str:
    return f"void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, {op}, unsigned int, 4> >(...)"


# Name, class and short name.
NAMES = [
    ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_"
     "split_k_kernel__5x_cublas", "matmul",
     "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_split_k"),
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd<64> >()",
     "attention", "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"),
    ("merge_kernel", "attention", "merge_kernel"),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication",
     "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
    ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 8>(float*)", "softmax",
     "softmax_warp_forward"),
    (vectorized(MUL), "elementwise", "vectorized_elementwise[mul]"),
    ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<"
     "at::native::direct_copy_kernel_cuda("
     "at::TensorIteratorBase&)::{lambda()#3}>(at::TensorIterator&)>()", "copy/cast",
     "elementwise[direct_copy]"),
    ("Memcpy HtoD (Pageable -> Device)", "copy/cast", "Memcpy HtoD"),
    (reduce("at::native::MeanOps<float, float, float, float>"), "reduction", "reduce[mean]"),
    (f"{NATIVE}indexSelectLargeIndex<float, long>(...)", "embedding/index", "indexSelectLargeIndex"),
    ("void at::native::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
     "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float> >()", "optimizer",
     "multi_tensor_apply[fused_adam]"),
    ("multi_tensor_apply_kernel<List, CopyFunctor<float> >()", "copy/cast", "multi_tensor_apply[copy]"),
    ("multi_tensor_apply_kernel<List, LpNormFunctor<float> >()", "reduction", "multi_tensor_apply[lpnorm]"),
    ("triton_poi_fused_add_mul_silu_2", "elementwise", "triton_poi_fused_add_mul_silu_2"),
    ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_3", "normalisation",
     "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_3"),
    ("aten::add_", "elementwise", "aten::add_"),
    ("something_nobody_ever_saw", "other", "something_nobody_ever_saw"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "short"), NAMES, ids=[short for _, _, short in NAMES])
def test_class_and_short_name(name, kind, short):
    assert (kernel_class(name), short_name(name)) == (kind, short)


def test_both_profilers_spell_one_kernel():
    nsight = (
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::BinaryFunctor<float, float, "
        "float, at::native::binary_internal::MulFunctor<float>>, std::array<char *, (unsigned long)3>>(int)"
    )
    assert short_name(nsight) == short_name(vectorized(MUL))


def test_no_kernel_of_real_profiles_is_unclassified():
    tables = ("nsys_top_kernels", "nsys_top_kernels_xl_a100")
    names = {name for table in tables for name in published(table).kernel}
    query = "SELECT value FROM StringIds JOIN CUPTI_ACTIVITY_KIND_KERNEL ON id = demangledName"
    with sqlite3.connect(SAMPLE) as export:
        names |= {name for (name,) in export.execute(query)}
    for kept in (project().figures / "h200" / "nsys_profile").glob("*.json.gz"):
        names |= set(read_trace(kept).kernels.name)
    assert len(names) > 100
    assert [name for name in names if kernel_class(name) == "other"] == []
    assert max(map(len, map(short_name, names))) < 80
