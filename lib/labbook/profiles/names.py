"""What a kernel's name says: its class, and a form short enough to read.

On a GPU names come from cuBLAS, CUTLASS, ATen, Triton (torch.compile's and ours), NCCL, FlashAttention and
cuDNN; on a CPU they are ATen's operators (aten::mm).
"""

import csv
import re
from functools import cache
from pathlib import Path

# The first pattern found in the name decides. The order matters: fused attention is made of matmuls, a
# softmax of reductions, and torch.compile lists in a kernel's name everything it fused.
_CLASSES = Path(__file__).with_name("classes.csv").read_text(encoding="utf-8")
_PATTERNS = list(csv.DictReader(_CLASSES.splitlines()))


@cache
def kernel_class(name: str) -> str:
    """What kind of work it does; "other" is what no pattern knows, and is meant to be seen and not hidden."""
    for row in _PATTERNS:
        if re.search(row["pattern"], name.lower()):
            return row["class"]
    return "other"


# Templates that say how a kernel goes through memory; what it computes is an argument of theirs.
_TEMPLATES = re.compile(r"elementwise|^reduce_kernel|multi_tensor_apply")
# CUDAFunctor_add -> add; MulFunctor -> mul, but not BinaryFunctor and its like, which only hand on another;
# MeanOps<float> -> mean; std::multiplies<float>; at::native::Sqrt<float>.
_ARGUMENT = re.compile(
    r"CUDAFunctor\w*?_(\w+)|\b(?!(?:[AB]?Unary|Binary|Ternary|Pointwise)(?:Op\w*)?Functor)(\w+?)_?[Ff]unctor\b"
    r"|(\w+)Ops<|std::(multiplies|divides|plus|minus)<|::(Sqrt|Abs|Neg)<"
)
# Where the argument is a lambda, the function that it stands in:
# direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda -> direct_copy.
_LAMBDA = re.compile(r"(\w+?)(?:_cuda)?_kernel(?:_cuda|_impl)*(?:<[^()<>]*>)?\(at::TensorIterator")
_RENAMED = {
    "multiplies": "mul",
    "divides": "div",
    "plus": "add",
    "minus": "sub",
    "maxnan": "max",
    "minnan": "min",
    "fusedadammath": "fused_adam",
}


@cache
def short_name(name: str) -> str:
    """A name that fits a table; Nsight Systems' and torch.profiler's spelling of a kernel give the same one.

    void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<..., MulFunctor<float>>>(...)
    becomes vectorized_elementwise[mul].
    """
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", name)
    # Memcpy HtoD (Pageable -> Device)
    if short := re.match(r"Mem\w+( \w+)?|aten::.*", plain):
        return short[0]
    base = re.match(r"[^<(]*", plain)[0].split("::")[-1].strip() or plain
    # All of CUTLASS's are one kernel; what it runs is its argument.
    if cutlass := re.search(r"cutlass::Kernel2?<\s*(?:\w+::)*(\w+)", plain):
        base = cutlass[1]
    # Of cuBLAS: without what follows the warps, but with whether it splits k.
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
