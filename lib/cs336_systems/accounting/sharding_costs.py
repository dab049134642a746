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
temporaries with one number a row, padding, DDP's fresh gradients of one bucket, what the allocator and the
matrix library keep. With a few tokens, where embedding and head outweigh what the blocks save, the peak may
lie elsewhere, and be higher.
"""

from collections.abc import Iterable, Mapping

from cs336_systems.accounting.collective_costs import MB, rank_bytes
from cs336_systems.accounting.element_counts import FLOAT32_BYTES, Counts, dtype_bytes
from cs336_systems.accounting.flops import parameter_breakdown, parameter_count
from cs336_systems.accounting.model_memory import head_phases, parameter_bytes, saved_by_block
from cs336_systems.configs import ModelConfig
from cs336_systems.sharding import SHARDED, Sharding

CATEGORIES = SHARDED + ("rest",)
TOKEN_BYTES = 2 * 8  # an id and a target, 64-bit integers


def sent_bytes(
    config: ModelConfig, sharding: Sharding, world_size: int, dtype: str = "float32"
) -> dict[str, float]:
    """Bytes that a rank sends in a step, by collective (see `rank_bytes`)."""
    itemsize = dtype_bytes(dtype)
    numbers = parameter_count(config)
    if "parameters" in sharding.shards:
        replicated = _numbers_in(config, sharding.replicates)
        sharded = itemsize * (numbers - replicated)
        # What stays from forward to backward is gathered once, all else for both.
        stays = itemsize * _numbers_in(config, sharding.stays)
        sizes = {"all_gather": 2 * sharded - stays, "reduce_scatter": sharded}
        if replicated:
            sizes["all_reduce"] = FLOAT32_BYTES * replicated
    else:
        sent_itemsize = itemsize if sharding.rounds else FLOAT32_BYTES
        sizes = dict.fromkeys(sharding.sends, sent_itemsize * numbers)
    return {name: rank_bytes(name, size, world_size) for name, size in sizes.items()}


def gathered_units(
    config: ModelConfig, sharding: Sharding, dtype: str = "float32"
) -> dict[str, dict[str, int]]:
    """What is gathered in each pass, in its order: by the name of the module, the bytes of its weights."""
    units = _units(config, sharding) if sharding.unit else {}
    forward = {unit: dtype_bytes(dtype) * numbers for unit, numbers in units.items()}
    again = {unit: size for unit, size in forward.items() if unit not in sharding.stays}
    return {"forward": forward, "backward": dict(reversed(again.items()))}


def _units(config, sharding):
    """How many numbers each unit has, by the name of its module, in the order of the forward."""
    d = config.d_model
    projections = (".attn.q_proj", ".attn.k_proj", ".attn.v_proj", ".attn.output_proj")
    weights = dict.fromkeys(projections, d * d)
    weights |= dict.fromkeys((".ffn.w1", ".ffn.w3", ".ffn.w2"), d * config.d_ff)
    if sharding.unit == "block":
        norms = 0 if "norms" in sharding.replicates else 2 * d
        weights = {"": sum(weights.values()) + norms}
    blocks = {
        f"layers.{block}{name}": numbers
        for block in range(config.num_layers)
        for name, numbers in weights.items()
    }
    embedding = config.vocab_size * d  # and so much has the head
    if "token_embeddings" in sharding.stays:  # one unit with all that is around the blocks
        # The embedding, the head and the last norm.
        return {"token_embeddings": 2 * embedding + d} | blocks
    return {"token_embeddings": embedding} | blocks | {"lm_head": embedding}


def held_bytes(
    config: ModelConfig, sharding: Sharding, world_size: int, batch_size: int, context_length: int,
    dtype: str = "float32", device: str = "cuda"
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Bytes that a rank holds at four moments, in each of CATEGORIES; attention and AdamW are fused.

    Before and after the step are those of the first step, which begins without gradients and without state.
    The peak is that of a later one. Buffers, the rotary tables, are counted with the parameters.

    Args:
        batch_size: sequences of this rank.
        device: "cuda", whose float32 attention lays its output out as the next projection reads it, or "cpu".
    """
    whole = parameter_bytes(config)
    replicated = FLOAT32_BYTES * _numbers_in(config, sharding.replicates)
    share = replicated + (whole - replicated) / world_size
    tokens = TOKEN_BYTES * batch_size * context_length
    held = {name: share if name in sharding.shards else whole for name in SHARDED}
    held["parameters"] += FLOAT32_BYTES * context_length * config.d_head  # rotary tables
    held["optimizer state"] *= 2  # two moments
    held["rest"] = tokens
    n = Counts(
        config,
        batch_size,
        context_length,
        dtype,
        casts=sharding.casts,
        fused_attention=True,
        heads_last=device == "cuda" and dtype_bytes(dtype) == FLOAT32_BYTES,
    )
    gradients, rest = max(peak_phases(n, sharding, world_size).values(), key=sum)
    without_state = held | {"optimizer state": 0.0}
    return {
        "initialised": without_state | {"gradients": 0.0},
        "before step": without_state,
        "after step": held,
        "peak": held | {"gradients": gradients, "rest": tokens + rest},
    }


def peak_phases(n: Counts, sharding: Sharding, world_size: int) -> dict[str, tuple[float, float]]:
    """Bytes of gradients, and of the rest, in each phase that can have the peak.

    loss: everything saved, and three temporaries of the logits' size.
    output head: the gradients of its input and of its weight.
    last block: what the blocks saved, both gradients of silu(w1 x) * w3 x, the gradient of w2.
    block 0, block 1, ...: the same of each, where gradients are sharded and come one unit after the other.
    Buckets of gradients stay allocated. Beside sharded ones are the weights that are whole, and the whole
    gradients of the unit before, which are being reduced. What stays gathered is freed with its gradients,
    except where it is one unit with the embedding.
    """
    block = sum(saved_by_block(n).values())
    alive = head_phases(n, n.layers * block)
    if "gradients" in sharding.shards:
        return _sharded_phases(n, sharding, world_size, block, alive)
    alive["last block"] = n.layers * block + _block_temporaries(n)
    gradients = parameter_bytes(n.config)
    return {phase: (gradients, rest) for phase, rest in alive.items()}


def _block_temporaries(n):
    return n.stream_itemsize * n.stream + n.itemsize * (2 * n.hidden + n.feed_forward_weight)


def _sharded_phases(n, sharding, world_size, block, alive):
    """`peak_phases` where parameters and gradients are sharded; block: what one saves, alive: at the head.

    A block is fullest where its backward begins, or where it ends if its gradients outweigh what it saved.
    """
    # Of weights the largest: one of the feed-forward layer's.
    unit = n.itemsize * (n.feed_forward_weight if sharding.unit == "weight" else n.block_weights)
    ahead = sharding.ahead * unit
    stays = n.itemsize * _numbers_in(n.config, sharding.stays)
    head_gradient = n.itemsize * n.head_weight
    head_share = FLOAT32_BYTES * n.head_weight / world_size
    phases = {
        "loss": (0.0, alive["loss"] + stays),
        "output head": (0.0, alive["output head"] + stays + ahead),
    }
    in_block = unit + max(block + _block_temporaries(n), unit)
    if "token_embeddings" in sharding.stays:
        # One unit with the head: its weights stay until its gradients are reduced, behind all blocks.
        in_block += stays + head_gradient
        head_gradient = head_share = 0.0
    for number in range(n.layers):
        behind = n.layers - 1 - number
        # Ahead of the first block is the embedding, as large as the head.
        gathered = ahead if number else head_gradient
        # Whole, as it is being reduced: the gradient of the unit behind.
        unreduced = unit if behind else head_gradient
        if n.itemsize < FLOAT32_BYTES and not sharding.copies:
            # And what has arrived of it in 16 bits, beside the float32 share.
            unreduced += unreduced / world_size
        shares = head_share + FLOAT32_BYTES * behind * n.block_weights / world_size
        phases[f"block {number}"] = (shares, number * block + in_block + gathered + unreduced)
    return phases


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
    sent = {name: [] for name in predicted}
    for collective, size in messages:
        sent.setdefault(collective, []).append(rank_bytes(collective, size, world_size))
    return [
        {
            "collective": name,
            "calls": len(sizes),
            "sent_mb": sum(sizes) / MB,
            "predicted_sent_mb": predicted.get(name, 0.0) / MB,
        }
        for name, sizes in sent.items()
    ]


def _numbers_in(config, parts):
    return sum(parameter_breakdown(config)[part] for part in parts)
