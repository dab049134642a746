"""What a kernel's name says: its class, and a form short enough to read.

On a GPU names come from cuBLAS, CUTLASS, ATen, Triton (torch.compile's and ours), NCCL, FlashAttention and
cuDNN; on a CPU they are ATen's operators (aten::mm).
"""

import re
from functools import cache

# The first pattern found in the name decides. The order matters: fused attention is made of matmuls, a
# softmax of reductions, and torch.compile lists in a kernel's name everything it fused.
_PATTERNS = (
    (
        "communication",
        r"nccl|c10d|all_?reduce|all_?gather|reduce_?scatter|broadcast_coalesced|multimem|gloo",
    ),
    ("attention", r"flash|fmha|sdpa|attention|attn|mem_?eff"),
    # Ours: what attends, and what prepares and adds up for it.
    (
        "attention",
        r"^((hopper_)?(forward|backward|dq|dkdv)|bwd_(pre|post)process|split|merge|sum)_kernel$",
    ),
    (
        "optimizer",
        r"(multi_tensor_apply|_foreach_)(?!.*(copy|norm))|fused_?adam|addcdiv|addcmul|lerp",
    ),
    ("matmul", r"gemm|gemv|nvjet|wgmma|splitkreduce|cutlass_\d+_|triton_(tem_|mm)"),
    ("matmul", r"\bdot_kernel|reduce_1block_kernel"),  # cuBLAS's dot product
    ("matmul", r"^aten::((add|bad)?d?b?mm|(add)?mv|dot|mkldnn_\w+|_scaled_mm|linear|matmul)$"),
    ("softmax", r"softmax"),
    ("normalisation", r"(layer|rms|batch|group)_?norm|gammabeta|rowwisemoments|triton_\w+rsqrt"),
    (
        "embedding/index",
        r"embedding|gather|scatter|(?<!with_)index|radixsort|devicecompact|masked_select",
    ),
    (
        "embedding/index",
        r"unique|partials?(_per)?_segment|grad_weight|^aten::(\w*sort|topk|nonzero|take)",
    ),
    ("copy/cast", r"memcpy|memset|direct_copy|float\w*_copy_kernel|to_device|catarray|fillfunctor"),
    (
        "copy/cast",
        r"^aten::(copy_|clone|contiguous|to|_to_copy|fill_|zero_|cat|stack|_conj|pin_memory)$",
    ),
    ("copy/cast", r"^triton_poi_fused_(_to_copy|clone|cat|copy)(_\d+)?$|copyfunctor|_foreach_copy"),
    (
        "reduction",
        r"reduce_kernel|nll_loss|triton_(red|per)_|device(reduce|scan)|logsumexp|cross_entropy",
    ),
    ("reduction", r"^aten::(sum|mean|(a|arg)?(max|min)|(\w+_)?norm|prod|cumsum|any|all)$|lpnorm"),
    ("elementwise", r"^(swiglu_(for|back)ward|rotary)_kernel$"),  # ours
    (
        "elementwise",
        r"elementwise|triton_poi_|triu_tril|distribution_|_local_scalar_dense|isfinite",
    ),
    (
        "elementwise",
        r"^aten::(add|r?sub|mul|div|pow|exp|log|r?sqrt|neg|sin|cos|abs|reciprocal|clamp\w*)_?$",
    ),
    ("elementwise", r"^aten::(sigmoid|silu|relu|gelu|tanh|threshold)(_backward)?_?$"),
    (
        "elementwise",
        r"^aten::(where|masked_fill|tril|triu|maximum|minimum|arange|normal|uniform|random)_?$",
    ),
    ("elementwise", r"^aten::(eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|erfinv)_?$"),
)


@cache
def kernel_class(name: str) -> str:
    """What kind of work it does; "other" is what no pattern knows, and is meant to be seen and not hidden."""
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, name.lower())), "other")


# Templates that say how a kernel goes through memory; what it computes is an argument of theirs.
_TEMPLATES = re.compile(r"elementwise|^reduce_kernel|multi_tensor_apply")
_ARGUMENT = re.compile(
    r"CUDAFunctor\w*?_(\w+)|\b(?!(?:[AB]?Unary|Binary|Ternary|Pointwise)(?:Op\w*)?Functor)(\w+?)_?[Ff]unctor\b"
    r"|(\w+)Ops<|std::(multiplies|divides|plus|minus)<|::(Sqrt|Abs|Neg)<"
)
_LAMBDA = re.compile(r"(\w+?)(?:_cuda)?_kernel(?:_cuda|_impl)*(?:<[^()<>]*>)?\(at::TensorIterator")
_RENAMED = {"multiplies": "mul", "divides": "div", "plus": "add", "minus": "sub", "maxnan": "max"}
_RENAMED |= {"minnan": "min", "fusedadammath": "fused_adam"}


@cache
def short_name(name: str) -> str:
    """A name that fits a table; Nsight Systems' and torch.profiler's spelling of a kernel give the same one.

    void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<..., MulFunctor<float>>>(...)
    becomes vectorized_elementwise[mul].
    """
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", name)
    short = re.match(r"Mem\w+( \w+)?|aten::.*", plain)  # Memcpy HtoD (Pageable -> Device)
    if short:
        return short[0]
    cutlass = re.search(r"cutlass::Kernel2?<\s*(?:\w+::)*(\w+)", plain)
    base = cutlass[1] if cutlass else re.match(r"[^<(]*", plain)[0].split("::")[-1].strip() or plain
    base = re.sub(r"_warpsize\w*?(_split_k)?_kernel__5x_cublas$", r"\1", base)
    if not _TEMPLATES.search(base):
        return base
    base = base.removesuffix("_kernel")
    argument = _ARGUMENT.search(plain) or _LAMBDA.search(plain)
    word = argument[argument.lastindex].lower() if argument else ""
    word = _RENAMED.get(word, word)
    if "PointwiseOp" in plain:
        word = f"addc{word}"  # its std::multiplies: addcmul
    return f"{base}[{word}]" if word else base
