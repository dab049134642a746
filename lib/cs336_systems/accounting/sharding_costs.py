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

from collections.abc import Iterable, Mapping

from cs336_systems.accounting.collective_costs import MB
from cs336_systems.accounting.element_counts import FLOAT32_BYTES, Counts, dtype_bytes
from cs336_systems.accounting.flops import parameter_breakdown, parameter_count
from cs336_systems.accounting.model_memory import saved_by_block, saved_by_head
from cs336_systems.configs import ModelConfig
from cs336_systems.sharding import SHARDED, Sharding

CATEGORIES = SHARDED + ("rest",)
TOKEN_BYTES = 2 * 8  # an id and a target, 64-bit integers


def rank_bytes(collective: str, size: float, world_size: int) -> float:
    """Bytes that a rank sends when so many go through a collective: the mean over the ranks, around a ring.

    Every part passes W - 1 links, to be summed or to be spread; in an all-reduce both.
    """
    passes = 2 if collective == "all_reduce" else 1
    return passes * size * (world_size - 1) / world_size


def sent_bytes(
    config: ModelConfig, sharding: Sharding, world_size: int, dtype: str = "float32"
) -> dict[str, float]:
    """Bytes that a rank sends in a step, by collective (see `rank_bytes`)."""
    numbers = parameter_count(config)
    if "parameters" in sharding.shards:
        replicated = _count(config, sharding.replicates)
        low = dtype_bytes(dtype) * (numbers - replicated)
        # What stays from forward to backward is gathered once, all else for both.
        stays = dtype_bytes(dtype) * _count(config, sharding.stays)
        sizes = {"all_gather": 2 * low - stays, "reduce_scatter": low}
        if replicated:
            sizes["all_reduce"] = FLOAT32_BYTES * replicated
    else:
        width = dtype_bytes(dtype) if sharding.rounds else FLOAT32_BYTES
        sizes = dict.fromkeys(sharding.sends, width * numbers)
    return {name: rank_bytes(name, size, world_size) for name, size in sizes.items()}


def gathered_units(
    config: ModelConfig, sharding: Sharding, dtype: str = "float32"
) -> dict[str, dict[str, int]]:
    """What is gathered in each pass, in its order: by the name of the module, the bytes of its weights."""
    if not sharding.unit:
        return {"forward": {}, "backward": {}}
    d = config.d_model
    embedding = config.vocab_size * d
    projections = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj")
    weights = dict.fromkeys(projections, d * d)
    weights |= dict.fromkeys(("ffn.w1", "ffn.w3", "ffn.w2"), d * config.d_ff)
    norms = 0 if "norms" in sharding.replicates else 2 * d
    units = {"token_embeddings": embedding}
    for block in range(config.num_layers):
        if sharding.unit == "weight":
            units |= {f"layers.{block}.{name}": size for name, size in weights.items()}
        else:
            units[f"layers.{block}"] = sum(weights.values()) + norms
    if "token_embeddings" in sharding.stays:  # one unit with all that is around the blocks
        units["token_embeddings"] += d + embedding
    else:
        units["lm_head"] = embedding
    forward = {unit: dtype_bytes(dtype) * size for unit, size in units.items()}
    again = [unit for unit in reversed(forward) if unit not in sharding.stays]
    return {"forward": forward, "backward": {unit: forward[unit] for unit in again}}


def held_bytes(
    config: ModelConfig, sharding: Sharding, world_size: int, batch_size: int, context_length: int,
    dtype: str = "float32", device: str = "cuda",
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Bytes that a rank holds at four moments, in each of CATEGORIES; attention and AdamW are fused.

    Before and after the step are those of the first step, which begins without gradients and without state.
    The peak is that of a later one. Buffers, the rotary tables, are counted with the parameters.

    Args:
        batch_size: sequences of this rank.
        device: "cuda", whose float32 attention lays its output out as the next projection reads it, or "cpu".
    """
    replicated = FLOAT32_BYTES * _count(config, sharding.replicates)
    whole = FLOAT32_BYTES * parameter_count(config)
    share = replicated + (whole - replicated) / world_size
    parameters, gradients, state = (share if name in sharding.shards else whole for name in SHARDED)
    rotary = FLOAT32_BYTES * context_length * config.d_head
    tokens = TOKEN_BYTES * batch_size * context_length
    held = {
        "parameters": parameters + rotary,
        "gradients": gradients,
        "optimizer state": 2 * state,
        "rest": tokens,
    }
    is_float32 = dtype_bytes(dtype) == FLOAT32_BYTES
    n = Counts(
        config,
        batch_size,
        context_length,
        dtype,
        casts=sharding.casts,
        fused_attention=True,
        heads_last=device == "cuda" and is_float32,
    )
    peak_gradients, rest = max(peak_phases(n, sharding, world_size).values(), key=sum)
    without_state = held | {"optimizer state": 0.0}
    return {
        "initialised": without_state | {"gradients": 0.0},
        "before step": without_state,
        "after step": held,
        "peak": held | {"gradients": peak_gradients, "rest": tokens + rest},
    }


def peak_phases(n: Counts, sharding: Sharding, world_size: int) -> dict[str, tuple[float, float]]:
    """Bytes of gradients, and of the rest, in each phase that can have the peak.

    loss: everything saved, and three temporaries of the logits' size.
    output head: the gradients of its input and of its weight.
    last block: what the blocks saved, both gradients of silu(w1 x) * w3 x, the gradient of w2.
    first block: what it saved, and all gradients but its own.
    Buckets of gradients stay allocated; gradients that are sharded come one unit after the other. Beside
    them the weights that are whole, and the whole gradients of the unit before, which are being reduced. What
    stays gathered is freed with its gradients, except where it is one unit with the embedding.
    """
    block = sum(saved_by_block(n).values())
    blocks = n.layers * block
    saved = blocks + sum(saved_by_head(n).values())
    stream = n.stream_width * n.stream
    logits = FLOAT32_BYTES * n.logits
    loss = saved + 3 * logits
    output_head = saved - logits + n.width * (n.logits + n.head) + stream
    in_block = 2 * n.width * n.hidden + stream + n.width * n.feed_forward
    if "gradients" not in sharding.shards:
        whole = FLOAT32_BYTES * parameter_count(n.config)
        phases = {"loss": loss, "output head": output_head, "last block": blocks + in_block}
        return {name: (whole, rest) for name, rest in phases.items()}
    unit = n.width * (n.feed_forward if sharding.unit == "weight" else n.block_weights)
    stays = n.width * _count(n.config, sharding.stays)
    computing = in_block + (1 + sharding.ahead) * unit
    copying = stream + (2 + sharding.ahead) * unit if sharding.copies else 0
    whole = max(computing, copying) + (stays if sharding.copies else 0)
    head_share = FLOAT32_BYTES * n.head / world_size
    blocks_share = FLOAT32_BYTES * (n.layers - 1) * n.block_weights / world_size
    last_block = blocks + n.width * n.head + whole
    first_block = block + unit + whole
    return {
        "loss": (0.0, loss + stays),
        "output head": (0.0, output_head + stays + sharding.ahead * unit),
        "last block": (0.0 if sharding.copies else head_share, last_block),
        "first block": (head_share + blocks_share, first_block),
    }


def memory_rows(held: Mapping[str, Mapping], predicted: Mapping[str, Mapping]) -> list[dict]:
    """Bytes held at each moment in each category, beside those of `held_bytes`."""
    return [
        {
            "moment": moment,
            "category": category,
            "size_mib": size / MB,
            "predicted_mib": predicted[moment][category] / MB,
        }
        for moment, sizes in held.items()
        for category, size in sizes.items()
    ]


def message_rows(
    messages: Iterable[tuple[str, int]], predicted: Mapping[str, float], world_size: int
) -> list[dict]:
    """What a rank sends in a step, from (collective, bytes) of its messages, beside that of `sent_bytes`."""
    sizes = {name: [] for name in predicted}
    for collective, size in messages:
        sizes.setdefault(collective, []).append(rank_bytes(collective, size, world_size))
    return [
        {
            "collective": name,
            "calls": len(sent),
            "sent_mb": sum(sent) / MB,
            "predicted_sent_mb": predicted.get(name, 0.0) / MB,
        }
        for name, sent in sizes.items()
    ]


def _count(config, parts):
    return sum(parameter_breakdown(config)[part] for part in parts)
