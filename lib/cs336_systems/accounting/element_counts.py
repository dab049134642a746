"""How many elements the tensors of one step have: the words in which the memory formulas are written."""

from dataclasses import dataclass

from cs336_systems.accounting.arguments import FLOAT32_BYTES, check_positive_integers, dtype_bytes
from cs336_systems.configs import ModelConfig


@dataclass(frozen=True)
class Elements:
    """Element counts for a batch of B sequences of T tokens, and the bytes of one element.

    Raises:
        ValueError: B or T is no positive integer, or the type is unknown.
    """

    config: ModelConfig
    batch_size: int
    context_length: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_positive_integers(batch_size=self.batch_size, context_length=self.context_length)
        dtype_bytes(self.dtype)

    @property
    def width(self) -> int:
        """Bytes of an element that is computed in `dtype`."""
        return dtype_bytes(self.dtype)

    @property
    def copy_width(self) -> int:
        """Bytes of an element in a copy that autocast makes: none in float32, where it makes no copies."""
        return self.width if self.width < FLOAT32_BYTES else 0

    @property
    def tokens(self) -> int:
        return self.batch_size * self.context_length

    @property
    def stream(self) -> int:
        """The residual stream, and every activation as wide as the model: B T D."""
        return self.tokens * self.config.d_model

    @property
    def hidden(self) -> int:
        """Every activation inside the feed-forward layer: B T F."""
        return self.tokens * self.config.d_ff

    @property
    def rows(self) -> int:
        """One number for each row of scores: B T H."""
        return self.tokens * self.config.num_heads

    @property
    def scores(self) -> int:
        """The scores of all heads of one layer: B H T^2."""
        return self.rows * self.context_length

    @property
    def logits(self) -> int:
        return self.tokens * self.config.vocab_size

    @property
    def projection(self) -> int:
        """Weight of one of attention's four projections: D^2."""
        return self.config.d_model**2

    @property
    def feed_forward(self) -> int:
        """Weight of one of the three feed-forward matrices: D F."""
        return self.config.d_model * self.config.d_ff

    @property
    def head(self) -> int:
        """Weight of the output head: V D."""
        return self.config.vocab_size * self.config.d_model

    @property
    def block_weights(self) -> int:
        """The matrices of one block."""
        return 4 * self.projection + 3 * self.feed_forward
