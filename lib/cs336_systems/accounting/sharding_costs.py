"""What a sharding strategy costs a rank: bytes in memory, at four moments, and bytes sent in a step.

With P the bytes of float32 parameters and W ranks, AdamW's state is 2P; a category is whole or shared:

    strategy                      parameters  gradients  state  sent by a rank in a step, times (W - 1) / W
    DDP                           P           P          2P     2P  all-reduce
    ZeRO 1 of the handout         P           P          2P/W   2P  all-reduce + P  broadcast
    ZeRO 1 of the paper           P           P          2P/W   P  reduce-scatter + P  all-gather
    FSDP (ZeRO 3)                 P/W         P/W        2P/W   P  reduce-scatter + 2 P  all-gather
    FSDP, weights kept (ZeRO 2)   P/W, P in a step  P/W  2P/W   P  reduce-scatter + P  all-gather

(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5
and 7.) FSDP in 16 bits gathers and reduces half as much; what stays gathered from forward to backward is
gathered once. The rest is activations, gathered weights and what is being sent. Left out because small:
temporaries with one number a row, padding, what the allocator and the matrix library keep.
"""

from dataclasses import dataclass

from cs336_systems.accounting.element_counts import FLOAT32_BYTES, Counts, dtype_bytes
from cs336_systems.accounting.flops import parameter_breakdown, parameter_count
from cs336_systems.accounting.model_memory import saved_by_block, saved_by_head
from cs336_systems.arguments import check_choice, check_positive_integers
from cs336_systems.configs import ModelConfig

MOMENTS = ("initialised", "before step", "after step", "peak")
SHARDED = ("parameters", "gradients", "optimizer state")
CATEGORIES = (*SHARDED, "rest")
TOKEN_BYTES = 2 * 8  # an id and a target, 64-bit integers


@dataclass(frozen=True)
class Strategy:
    """What a strategy sends and what it shards.

    sends: collectives in which all parameters or all gradients travel in a step.
    shards: what a rank holds only its share of, of SHARDED. What shards parameters computes in 16 bits
        itself; the others run the forward under autocast.
    unit: what is gathered at once, a "weight" or a "block"; "" where nothing is.
    ahead: how many units are gathered ahead of use in backward.
    copies: a message is gathered into a buffer, and copied from there to the weights.
    replicates, stays: parts of the parameters, in the words of `parameter_breakdown`, that are not sharded
        after all; and that stay gathered from forward to backward.
    """

    sends: tuple[str, ...]
    shards: tuple[str, ...] = ()
    unit: str = ""
    ahead: int = 0
    copies: bool = False
    replicates: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()


_ALL = ("token_embeddings", "attention", "feed_forward", "norms", "lm_head")
_STATE, _FSDP = SHARDED[2:], {"sends": ("all_gather", "reduce_scatter"), "shards": SHARDED}
_OURS = _FSDP | {"replicates": ("norms",), "stays": ("lm_head",)}
STRATEGIES: dict[str, Strategy] = {
    "ddp": Strategy(("all_reduce",)),
    "zero": Strategy(("all_reduce", "broadcast"), _STATE),
    "sharded": Strategy(("all_reduce", "all_gather"), _STATE),
    "sharded_scatter": Strategy(("reduce_scatter", "all_gather"), _STATE),
    "fsdp2": Strategy(
        **_FSDP, unit="block", ahead=1, copies=True, stays=("token_embeddings", "norms", "lm_head")
    ),
    "fsdp2_kept": Strategy(**_FSDP, unit="block", stays=_ALL),
    "fsdp_weight": Strategy(**_OURS, unit="weight", ahead=2),
    "fsdp_block": Strategy(**_OURS, unit="block", ahead=1),
    "fsdp_kept": Strategy(
        **_OURS | {"stays": ("attention", "feed_forward", "lm_head")}, unit="block"
    ),
}


def sent_bytes(
    config: ModelConfig, strategy: str, world_size: int, dtype: str = "float32"
) -> dict[str, float]:
    """Bytes that a rank sends in a step, by collective; the mean over the ranks, around rings.

    In each collective every part passes W - 1 links, to be summed or to be spread; in an all-reduce both.
    """
    entry = _entry(strategy)
    check_positive_integers(world_size=world_size)
    numbers, around = parameter_count(config), (world_size - 1) / world_size
    if "parameters" not in entry.shards:
        whole = around * FLOAT32_BYTES * numbers
        return {name: whole * (2 if name == "all_reduce" else 1) for name in entry.sends}
    stays, apart = (_count(config, parts) for parts in (entry.stays, entry.replicates))
    travel = dtype_bytes(dtype) * (numbers - apart)
    sent = {"all_gather": 2 * travel - dtype_bytes(dtype) * stays, "reduce_scatter": travel}
    sent |= {"all_reduce": 2 * FLOAT32_BYTES * apart} if apart else {}
    return {name: around * size for name, size in sent.items()}


def gathered_units(
    config: ModelConfig, strategy: str, dtype: str = "float32"
) -> dict[str, dict[str, int]]:
    """What is gathered in each pass, in its order: by the name of the module, the bytes of its weights."""
    entry, d = _entry(strategy), config.d_model
    forward: dict[str, int] = {}
    if entry.unit:
        forward["token_embeddings"] = config.vocab_size * d
    for number in range(config.num_layers if entry.unit else 0):
        block = dict.fromkeys((f"attn.{part}_proj" for part in ("q", "k", "v", "output")), d * d)
        block |= dict.fromkeys(("ffn.w1", "ffn.w3", "ffn.w2"), d * config.d_ff)
        norms = 0 if "norms" in entry.replicates else 2 * d
        units = block if entry.unit == "weight" else {"": sum(block.values()) + norms}
        forward |= {f"layers.{number}.{part}".rstrip("."): size for part, size in units.items()}
    if "token_embeddings" in entry.stays:  # one unit with all that is around the blocks
        forward["token_embeddings"] += d + config.vocab_size * d
    elif entry.unit:
        forward["lm_head"] = config.vocab_size * d
    forward = {unit: dtype_bytes(dtype) * size for unit, size in forward.items()}
    backward = {unit: size for unit, size in reversed(forward.items()) if unit not in entry.stays}
    return {"forward": forward, "backward": backward}


def held_bytes(
    config: ModelConfig, strategy: str, world_size: int, batch_size: int, context_length: int,
    dtype: str = "float32", device: str = "cuda",
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Bytes that a rank holds at each of MOMENTS, in each of CATEGORIES; attention and AdamW are fused.

    Before and after the step are those of the first step, which begins without gradients and without state.
    The peak is that of a later one. Buffers, the rotary tables, are counted with the parameters.

    Args:
        batch_size: sequences of this rank.
        device: "cuda", whose float32 attention lays its output out as the next projection reads it, or "cpu".
    """
    entry = _entry(strategy)
    check_positive_integers(world_size=world_size)
    whole, apart = parameter_count(config), _count(config, entry.replicates)
    shared = FLOAT32_BYTES * (apart + (whole - apart) / world_size)
    share = {name: shared if name in entry.shards else FLOAT32_BYTES * whole for name in SHARDED}
    tokens = TOKEN_BYTES * batch_size * context_length
    held = {
        "parameters": share["parameters"] + FLOAT32_BYTES * context_length * config.d_head,
        "gradients": share["gradients"],
        "optimizer state": 2 * share["optimizer state"],
        "rest": tokens,
    }
    heads_last = device == "cuda" and dtype_bytes(dtype) == FLOAT32_BYTES
    kernels = {
        "casts": "parameters" in entry.shards,
        "fused_attention": True,
        "heads_last": heads_last,
    }
    n = Counts(config, batch_size, context_length, dtype, **kernels)
    gradients, rest = max(peak_phases(n, entry, world_size).values(), key=sum)
    nothing = {"gradients": 0.0, "optimizer state": 0.0}
    return {
        "initialised": held | nothing,
        "before step": held | {"optimizer state": 0.0},
        "after step": held,
        "peak": held | {"gradients": gradients, "rest": tokens + rest},
    }


def peak_phases(n: Counts, entry: Strategy, world_size: int) -> dict[str, tuple[float, float]]:
    """Bytes of gradients, and of the rest, in each phase that can have the peak.

    loss: everything saved, and three temporaries of the logits' size.
    output head: the gradients of its input and of its weight.
    last block: what the blocks saved, both gradients of silu(w1 x) * w3 x, the gradient of w2.
    first block: what it saved, and all gradients but its own.
    Buckets of gradients stay allocated; gradients that are sharded come one unit after the other. Beside
    them the weights that are whole, and the whole gradients of the unit before, which are being reduced. What
    stays gathered is freed with its gradients, except where it is one unit with the embedding.
    """
    block, at_head = sum(saved_by_block(n).values()), sum(saved_by_head(n).values())
    blocks = n.layers * block
    stream, logits = n.stream_width * n.stream, FLOAT32_BYTES * n.logits
    loss = blocks + at_head + 3 * logits
    output_head = blocks + at_head - logits + n.width * (n.logits + n.head) + stream
    in_block = 2 * n.width * n.hidden + stream + n.width * n.feed_forward
    if "gradients" not in entry.shards:
        whole = FLOAT32_BYTES * parameter_count(n.config)
        phases = {"loss": loss, "output head": output_head, "last block": blocks + in_block}
        return {name: (whole, rest) for name, rest in phases.items()}
    unit = n.width * (n.feed_forward if entry.unit == "weight" else n.block_weights)
    head, stays = n.width * n.head, n.width * _count(n.config, entry.stays)
    some = FLOAT32_BYTES * n.head / world_size
    nearly_all = FLOAT32_BYTES * (n.head + (n.layers - 1) * n.block_weights) / world_size
    kept = (
        "attention" in entry.stays
    )  # the blocks' weights are whole until the backward of their block
    computing = in_block + (0 if kept else (1 + entry.ahead) * unit)
    copying = stream + (2 + entry.ahead) * unit if entry.copies else 0
    whole = max(computing, copying) + (stays if entry.copies or kept else 0)
    freed = (n.layers - 1) * unit if kept else 0
    return {
        "loss": (0.0, loss + stays),
        "output head": (0.0, output_head + stays + entry.ahead * unit),
        "last block": (0.0 if entry.copies else some, blocks + head + whole),
        "first block": (nearly_all, block + unit + whole - freed),
    }


def _count(config: ModelConfig, parts: tuple[str, ...]) -> int:
    return sum(parameter_breakdown(config)[part] for part in parts)


def _entry(strategy: str) -> Strategy:
    check_choice("implementation", strategy, STRATEGIES)
    return STRATEGIES[strategy]
