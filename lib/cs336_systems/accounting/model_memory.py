"""Bytes that live through a training step: parameters, gradients, optimizer state, saved activations.

Parameters, gradients and the optimizer's moments are float32. A 16-bit type means autocast: linear layers and
attention matmuls run in 16 bit on copies of their weights and inputs; the residual stream, the norms, the
softmax and the loss stay float32.
"""

from cs336_systems.accounting.arguments import FLOAT32_BYTES
from cs336_systems.accounting.element_counts import Elements
from cs336_systems.accounting.flops import parameter_count
from cs336_systems.configs import ModelConfig


def parameter_bytes(config: ModelConfig) -> int:
    """4 bytes a parameter; under autocast too, which keeps the float32 originals."""
    return FLOAT32_BYTES * parameter_count(config)


def gradient_bytes(config: ModelConfig) -> int:
    """A gradient has its parameter's shape and type."""
    return FLOAT32_BYTES * parameter_count(config)


def optimizer_bytes(config: ModelConfig) -> int:
    """AdamW's two moments for every parameter."""
    return 2 * FLOAT32_BYTES * parameter_count(config)


def block_activation_breakdown(
    config: ModelConfig, batch_size: int, context_length: int, dtype: str = "float32"
) -> dict[str, int]:
    """Bytes that one TransformerBlock saves for its backward pass, by name, in the order of the forward.

    Parameters themselves are not counted; the 16-bit copies that autocast makes of them are. Autocast also
    copies the input of linear layers, once for every layer that reads it.
    """
    n = Elements(config, batch_size, context_length, dtype)
    autocast = n.copy_width > 0
    return {
        "ln1 input": FLOAT32_BYTES * n.stream,
        "ln1 1/rms": FLOAT32_BYTES * n.tokens,
        "ln1 normalised": FLOAT32_BYTES * n.stream,
        "q, k, v projection input": n.width * n.stream * (3 if autocast else 1),
        "q, k, v": n.width * 3 * n.stream,
        "causal mask": context_length**2,
        "softmax exponentials": FLOAT32_BYTES * n.scores,
        "softmax row sums": FLOAT32_BYTES * n.rows,
        "attention weights": n.width * n.scores,
        "output projection input": n.width * n.stream,
        "ln2 input": FLOAT32_BYTES * n.stream,
        "ln2 1/rms": FLOAT32_BYTES * n.tokens,
        "ln2 normalised": FLOAT32_BYTES * n.stream,
        "w1, w3 input": n.width * n.stream * (2 if autocast else 1),
        "w1 output": n.width * n.hidden,
        "sigmoid": n.width * n.hidden,
        "silu": n.width * n.hidden,
        "w3 output": n.width * n.hidden,
        "w2 input": n.width * n.hidden,
        "weight copies": n.copy_width * n.block_weights,
    }


def head_activation_breakdown(
    config: ModelConfig, batch_size: int, context_length: int, dtype: str = "float32"
) -> dict[str, int]:
    """Bytes saved for backward after the last block: final norm, output head and cross-entropy."""
    n = Elements(config, batch_size, context_length, dtype)
    return {
        "ln_final input": FLOAT32_BYTES * n.stream,
        "ln_final 1/rms": FLOAT32_BYTES * n.tokens,
        "ln_final normalised": FLOAT32_BYTES * n.stream,
        "output head input": n.width * n.stream,
        "logits": FLOAT32_BYTES * n.logits,
        "logsumexp": FLOAT32_BYTES * n.tokens,
        "weight copies": n.copy_width * n.head,
    }


def activation_bytes(
    config: ModelConfig, batch_size: int, context_length: int, dtype: str = "float32"
) -> int:
    """Bytes that cross_entropy(model(tokens), targets) saves for backward, in all layers together.

    Token ids and targets, the rotary tables and the parameters are not counted: they are there anyway.
    """
    run = (config, batch_size, context_length, dtype)
    block = sum(block_activation_breakdown(*run).values())
    return config.num_layers * block + sum(head_activation_breakdown(*run).values())
