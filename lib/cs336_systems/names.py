"""The registry: every implementation, wrapper, dtype and pass, once, in the order of legends and tables.

Whatever else lists them (checks, sweeps, parameters of notebooks, axes, legends, tables) reads it from here.
To add an attention implementation, write its file and its line in ATTENTION.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any

# Okabe & Ito, "Color Universal Design" (2008), told apart with every kind of colour vision; and three more.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILLION, PURPLE, BLACK, GREY = "#D55E00", "#CC79A7", "#22272E", "#6B7077"
WINE, BROWN, YELLOW = "#7A1F5C", "#604418", "#F0E442"

# What an implementation may need: Triton, a compiler for torch.compile, tensors of 16 bits.
TRITON, COMPILER, SIXTEEN_BITS = "triton", "compiler", "16bit"


@dataclass(frozen=True)
class Named:
    """How a name is shown: its label, and its colour in every plot."""

    label: str
    color: str


@dataclass(frozen=True)
class Attention(Named):
    """An attention implementation.

    function: "package.module:name", called as function(q, k, v, is_causal); imported on first use.
    needs: TRITON, COMPILER, SIXTEEN_BITS.
    sdpa_backend: the backend of PyTorch's scaled_dot_product_attention to switch on around it.
    in_model: a model's blocks may call it, and `attention.attention` knows it.
    holds_scores: its memory grows with n_queries * n_keys.
    """

    function: str
    needs: frozenset[str] = frozenset()
    sdpa_backend: str = ""
    in_model: bool = False
    holds_scores: bool = False


_PACKAGE = "cs336_systems.attention"
_FLASH = f"{_PACKAGE}.flash_triton"
ATTENTION: dict[str, Attention] = {
    "plain": Attention("plain", BLUE, f"{_PACKAGE}.plain:plain_attention", in_model=True, holds_scores=True),
    "torch_softmax": Attention(
        "plain, torch.softmax", YELLOW, f"{_PACKAGE}.baselines:torch_softmax", holds_scores=True
    ),
    "compiled": Attention(
        "compiled", VERMILLION, f"{_PACKAGE}.baselines:compiled", frozenset({COMPILER}), holds_scores=True
    ),
    "sdpa": Attention("SDPA", GREY, f"{_PACKAGE}.baselines:sdpa", in_model=True),
    "sdpa_efficient": Attention(
        "SDPA, efficient", ORANGE, f"{_PACKAGE}.baselines:sdpa", sdpa_backend="EFFICIENT_ATTENTION"
    ),
    "sdpa_flash": Attention(
        "FlashAttention-2", PURPLE, f"{_PACKAGE}.baselines:sdpa", frozenset({SIXTEEN_BITS}), "FLASH_ATTENTION"
    ),
    "flex": Attention("FlexAttention", SKY, f"{_PACKAGE}.baselines:flex", frozenset({COMPILER})),
    "sdpa_cudnn": Attention(
        "cuDNN", BLACK, f"{_PACKAGE}.baselines:sdpa", frozenset({SIXTEEN_BITS}), "CUDNN_ATTENTION"
    ),
    "flash_pytorch": Attention(
        "Flash (PyTorch)", BROWN, f"{_PACKAGE}.flash_pytorch:FlashAttentionPyTorch.apply", in_model=True
    ),
    "flash_compiled": Attention(
        "Flash (compiled backward)",
        WINE,
        f"{_FLASH}:FlashAttentionCompiled.apply",
        frozenset({TRITON, COMPILER}),
    ),
    "flash_triton": Attention(
        "Flash (ours)", GREEN, f"{_FLASH}:flash_attention", frozenset({TRITON}), in_model=True
    ),
}
OURS = "flash_triton"
# What a model's blocks may be given; "auto" is the fastest of them that can run the tensors.
MODEL_ATTENTION = ("auto", *(name for name, entry in ATTENTION.items() if entry.in_model))

# A model's own code, run as it is or compiled.
MODEL_IMPLEMENTATIONS: dict[str, Named] = {
    "eager": Named("eager", BLUE),
    "compiled": Named("compiled", VERMILLION),
    "compiled_blocks": Named("compiled per block", ORANGE),
}

WEIGHTED_SUMS: dict[str, Named] = {
    "eager": Named("eager", BLUE),
    "compiled": Named("compiled", VERMILLION),
    "matmul": Named("matmul", PURPLE),
    "triton": Named("Triton", GREEN),
    "triton_descriptor": Named("Triton, descriptor", SKY),
}

# The fused kernels of a training step, and what they are compared with.
STEP_KERNELS: dict[str, Named] = {
    "eager": Named("eager", BLUE),
    "compiled": Named("compiled", VERMILLION),
    "liger": Named("Liger-Kernel", PURPLE),
    "triton": Named("Triton", GREEN),
}


@dataclass(frozen=True)
class Wrapper(Named):
    """A data-parallel wrapper. function: as in `Attention`; has_buckets: it takes bucket_size_mb."""

    function: str
    has_buckets: bool = False


WRAPPERS: dict[str, Wrapper] = {
    "single": Wrapper("one process", GREY, "cs336_systems.parallel.adapters:Single"),
    "naive": Wrapper("naive", ORANGE, "cs336_systems.parallel.ddp:NaiveDDP"),
    "flat": Wrapper("flat", SKY, "cs336_systems.parallel.ddp:FlatDDP"),
    "overlapped": Wrapper("overlapped", GREEN, "cs336_systems.parallel.overlapped:OverlappedDDP"),
    "bucketed": Wrapper("bucketed", BLUE, "cs336_systems.parallel.overlapped:BucketedDDP", has_buckets=True),
    "torch": Wrapper("PyTorch's DDP", BLACK, "cs336_systems.parallel.adapters:TorchDDP", has_buckets=True),
}


@dataclass(frozen=True)
class Sharding(Named):
    """A strategy of training on several GPUs: who wraps the module, and who wraps its optimizer.

    wrapper: "package.module:name", called as wrapper(module, **options), where it `casts` with compute_dtype.
    optimizer: called as optimizer(parameters, optimizer class, **settings); "" is the class itself.
    is_for_optimizer: the wrapper is called as wrapper(module, optimizer, **options).
    sends: collectives in which all parameters or all gradients travel in a step.
    shards: what a rank holds only its share of, of SHARDED.
    casts: the wrapper itself computes in 16 bits; without, the forward runs under autocast.
    unit: what is gathered at once, of UNITS; "" where nothing is.
    ahead: how many units are gathered ahead of use in backward.
    copies: a message is gathered into a buffer, and copied from there to the weights.
    replicates, stays: parts of the parameters, in the words of accounting.parameter_breakdown, that are not
        sharded after all; and that stay gathered from forward to backward.
    """

    wrapper: str
    optimizer: str = ""
    is_for_optimizer: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    sends: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    casts: bool = False
    unit: str = ""
    ahead: int = 0
    copies: bool = False
    replicates: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()


# What memory is used for in training; sharding shares the first three.
CATEGORIES: dict[str, Named] = {
    "parameters": Named("parameters", BLUE),
    "gradients": Named("gradients", ORANGE),
    "optimizer state": Named("optimizer state", SKY),
    "activations": Named("activations", GREEN),
    "temporary": Named("temporary", VERMILLION),
    "other": Named("other", GREY),
}
SHARDED = tuple(CATEGORIES)[:3]
UNITS = ("weight", "block")
_BUCKETED = {"wrapper": WRAPPERS["bucketed"].function, "options": (("bucket_size_mb", 25),)}
_ZERO = _BUCKETED | {"shards": ("optimizer state",)}
_FSDP = {"shards": SHARDED, "casts": True, "sends": ("all_gather", "reduce_scatter")}
_OURS = _FSDP | {"replicates": ("norms",), "stays": ("lm_head",)}
_OURS |= {"wrapper": "cs336_systems.parallel.fsdp:FSDP"}
_SHARDED = "cs336_systems.parallel.sharded_optimizer:ShardedOptimizer"
_ADAPTERS = "cs336_systems.parallel.adapters"
# fmt: off
SHARDINGS: dict[str, Sharding] = {
    "ddp": Sharding("DDP", BLUE, **_BUCKETED, sends=("all_reduce",)),
    "zero": Sharding(
        "PyTorch's ZeRO", GREY, **_ZERO, optimizer=f"{_ADAPTERS}:torch_zero",
        sends=("all_reduce", "broadcast"),
    ),
    "sharded": Sharding(
        "ShardedOptimizer", ORANGE, **_ZERO, optimizer=_SHARDED, sends=("all_reduce", "all_gather")
    ),
    "sharded_scatter": Sharding(
        "ZeRO 1 (paper)", VERMILLION, "cs336_systems.parallel.reduce_scatter_ddp:ReduceScatterDDP", _SHARDED,
        is_for_optimizer=True, shards=("optimizer state",), sends=("reduce_scatter", "all_gather"),
    ),
    "fsdp2": Sharding(
        "FSDP2", BLACK, f"{_ADAPTERS}:TorchFSDP", **_FSDP, unit="block", ahead=1, copies=True,
        stays=("token_embeddings", "norms", "lm_head"),
    ),
    "fsdp_weight": Sharding("FSDP by weight", SKY, **_OURS, unit="weight", ahead=2),
    "fsdp_block": Sharding(
        "FSDP by block", GREEN, **_OURS, unit="block", ahead=1,
        options=(("unit_types", ("TransformerBlock",)),),
    ),
}
# fmt: on


@dataclass(frozen=True)
class FullStep(Named):
    """How a training step of the leaderboard is put together.

    sharding: one of SHARDINGS.
    prepare: "package.module:name", called with the model before it is sharded.
    attention: one of ATTENTION.
    checkpoints: the share of blocks that keep their input only, through PyTorch's checkpointing.
    compiles: blocks go through torch.compile.
    selects: what blocks keep is solved for the memory that is left.
    """

    sharding: str
    prepare: str
    attention: str = OURS
    checkpoints: float = 0.0
    compiles: bool = False
    selects: bool = False


_LOSS, _KERNELS = (f"cs336_systems.training.fused:use_fused_{part}" for part in ("loss", "kernels"))
_BACKWARD = "cs336_systems.training.fused_block:use_fused_blocks"
FULL_STEPS: dict[str, FullStep] = {
    "fsdp2_compiled": FullStep(
        "FSDP2, compiled", BLACK, "fsdp2", _LOSS, "sdpa_cudnn", checkpoints=1, compiles=True
    ),
    "fsdp2_partly": FullStep(
        "FSDP2, 60 % checkpointed", GREY, "fsdp2", _LOSS, "sdpa_cudnn", checkpoints=0.6, compiles=True
    ),
    "fsdp_compiled": FullStep(
        "FSDP, compiled", PURPLE, "fsdp_block", _LOSS, "sdpa_cudnn", checkpoints=1, compiles=True
    ),
    "fused_kernels": FullStep("fused kernels", SKY, "fsdp_block", _KERNELS, checkpoints=1),
    "manual_backward": FullStep("manual backward", ORANGE, "fsdp_block", _BACKWARD),
    "selective": FullStep("selective recomputation", GREEN, "fsdp_block", _BACKWARD, selects=True),
}

COLLECTIVES: dict[str, Named] = {
    "all_reduce": Named("all-reduce", BLUE),
    "all_gather": Named("all-gather", GREEN),
    "reduce_scatter": Named("reduce-scatter", ORANGE),
    "broadcast": Named("broadcast", PURPLE),
}


@dataclass(frozen=True)
class DType(Named):
    """A dtype of the arithmetic. tensor: the torch.dtype of the tensors; bytes: of one of their elements."""

    tensor: str
    bytes: int


DTYPES: dict[str, DType] = {
    "float32": DType("float32", BLUE, "float32", 4),
    "tf32": DType("TF32", SKY, "float32", 4),  # float32 in memory: only matmuls round it
    "bfloat16": DType("bfloat16", VERMILLION, "bfloat16", 2),
    "float16": DType("float16", PURPLE, "float16", 2),
}

PASSES: dict[str, Named] = {
    "forward": Named("forward", SKY),
    "backward": Named("backward", ORANGE),
    "forward_backward": Named("forward + backward", BLUE),
    "train_step": Named("train step", BLACK),
}
# Attention alone has nothing to train.
ATTENTION_PASSES = tuple(name for name in PASSES if name != "train_step")


@cache
def load(function: str) -> Callable[..., Any]:
    """The object at "package.module:name"."""
    module, _, name = function.partition(":")
    return attrgetter(name)(import_module(module))


def torch_dtype(name: str) -> Any:
    """The torch.dtype of the tensors of one of DTYPES."""
    return load(f"torch:{DTYPES[name].tensor}")


def check_choice(what: str, value: Any, allowed: Iterable[Any]) -> None:
    """Refuse a name that is not one of the allowed.

    Raises:
        ValueError: it is not; the message lists those that are.
    """
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{what} {value!r} is unknown; allowed: {', '.join(map(str, allowed))}")
