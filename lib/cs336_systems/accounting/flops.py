"""Parameters, floating-point operations, and the time they take at best.

Symbols: batch B, context T, width D = d_model, feed-forward width F = d_ff, layers L, vocabulary V. The
matmul of an (m, k) and a (k, n) matrix counts 2 m k n operations: a multiplication and an addition per
term.
"""

from cs336_systems.accounting.element_counts import Counts
from cs336_systems.configs import ModelConfig

PASSES = ("forward", "backward", "forward_backward", "train_step")


def parameter_breakdown(config: ModelConfig) -> dict[str, int]:
    """How many numbers are learnt, part by part over the whole model.

    embeddings V D; attention 4 L D^2; feed-forward 3 L D F; norms (2 L + 1) D; output head V D (untied).
    """
    d = config.d_model
    layers = config.num_layers
    return {
        "token_embeddings": config.vocab_size * d,
        "attention": layers * 4 * d * d,
        "feed_forward": layers * 3 * d * config.d_ff,
        "norms": (2 * layers + 1) * d,
        "lm_head": config.vocab_size * d,
    }


def parameter_count(config: ModelConfig) -> int:
    """How many numbers the whole model learns."""
    return sum(parameter_breakdown(config).values())


def flops_breakdown(config: ModelConfig, batch_size: int, context_length: int) -> dict[str, int]:
    """Operations in the matmuls of one forward pass, part by part over the whole model.

    projections 8 L B T D^2; scores and their matmul with the values 2 L B T^2 D each, the masked half
    included, because eager attention computes it; feed-forward 6 L B T D F; output head 2 B T D V.
    """
    n = Counts(config, batch_size, context_length)
    scores = 2 * n.layers * n.stream * context_length
    return {
        "attention_projections": 8 * n.layers * n.tokens * n.projection_weight,
        "attention_scores": scores,
        "attention_values": scores,
        "feed_forward": 6 * n.layers * n.tokens * n.feed_forward_weight,
        "lm_head": 2 * n.tokens * n.head_weight,
    }


def forward_flops(config: ModelConfig, batch_size: int, context_length: int) -> int:
    """Operations in the matmuls of one forward pass; backward has two for every one of them."""
    return sum(flops_breakdown(config, batch_size, context_length).values())


def roofline_seconds(
    flops: float, bytes_moved: float, matmul_tflops: float, copy_gbps: float
) -> float:
    """Seconds a machine needs at least: max(FLOPs / rate, bytes / bandwidth) (Williams et al. 2009).

    Args:
        flops: operations to do; bytes_moved: bytes read from and written to memory.
        matmul_tflops: 10^12 operations per second; copy_gbps: 10^9 bytes per second, reads plus writes.
    """
    computing_s = flops / (matmul_tflops * 1e12)
    moving_s = bytes_moved / (copy_gbps * 1e9)
    return max(computing_s, moving_s)


def utilisation(flops: float, seconds: float, matmul_tflops: float) -> float:
    """Share of the machine's matmul rate that a step reached, 1.0 at best (Chowdhery et al. 2022, "MFU")."""
    return flops / (seconds * matmul_tflops * 1e12)
