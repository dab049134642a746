"""Element counts of a step's tensors, used by the memory formulas."""

from cs336_systems.arguments import check_positive_integers
from cs336_systems.configs import ModelConfig
from cs336_systems.dtypes import torch_dtype

FLOAT32_BYTES = 4


def dtype_bytes(dtype: str) -> int:
    """Bytes of an element."""
    return torch_dtype(dtype).itemsize


class Counts:
    """Element counts for a batch of B sequences of T tokens, and the bytes of one element.

    Args:
        dtype: of 16 bits, autocast to it; with `casts`, weights that are cast before they are used: then the
            residual stream is of 16 bits too, and nothing is copied to be multiplied.
        fused_attention: attention keeps its output and one number a row instead of scores.
        heads_last: and lays its output out as the next projection reads it, so that needs no copy.
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, context_length: int, dtype: str = "float32", *,
        casts: bool = False, fused_attention: bool = False, heads_last: bool = False,
    ):  # fmt: skip
        check_positive_integers(batch_size=batch_size, context_length=context_length)
        self.config = config
        self.layers = config.num_layers
        self.itemsize = dtype_bytes(dtype)  # of an element that is computed in `dtype`
        # Of an element in a copy that autocast makes: 0 where it makes none, as in float32.
        self.copy_itemsize = self.itemsize if self.itemsize < FLOAT32_BYTES and not casts else 0
        self.stream_itemsize = self.itemsize if casts else FLOAT32_BYTES  # of the residual stream
        self.fused_attention = fused_attention
        self.heads_last = heads_last
        self.tokens = batch_size * context_length
        # The residual stream, and all that has its shape: B T D.
        self.stream = self.tokens * config.d_model
        # Every activation inside the feed-forward layer: B T F.
        self.hidden = self.tokens * config.d_ff
        self.rows = self.tokens * config.num_heads  # one number for each row of scores: B T H
        self.scores = self.rows * context_length  # of all heads of one layer: B H T^2
        self.mask = context_length**2
        self.logits = self.tokens * config.vocab_size
        self.projection_weight = config.d_model**2  # of one of attention's four
        self.feed_forward_weight = config.d_model * config.d_ff  # of one of w1, w2, w3
        self.head_weight = config.vocab_size * config.d_model
        # The matrices of one block.
        self.block_weights = 4 * self.projection_weight + 3 * self.feed_forward_weight
