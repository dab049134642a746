"""What a strategy of training on several GPUs shards and sends: facts, for closed forms and for wrappers."""

from dataclasses import dataclass

SHARDED = ("parameters", "gradients", "optimizer state")
OPTIMIZER_STATE = SHARDED[2:]
AROUND_BLOCKS = ("token_embeddings", "norms", "lm_head")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What a strategy sends, and what of SHARDED a rank holds only its share of.

    sends: collectives in which all parameters or all gradients travel in a step.
    rounds: what travels is rounded to the dtype of the forward; weights and gradients stay float32.
    unit: what is gathered at once, a "weight" or a "block"; "" where nothing is.
    ahead: how many units are gathered ahead of use in backward.
    copies: a message has a buffer of its own, which is freed as soon as it is copied.
    replicates, stays: parts of the parameters, in the words of `accounting.parameter_breakdown`, that are not
        sharded after all; and that stay gathered from forward to backward.
    """

    sends: tuple[str, ...] = ("all_gather", "reduce_scatter")
    shards: tuple[str, ...] = SHARDED
    rounds: bool = False
    unit: str = ""
    ahead: int = 0
    copies: bool = False
    replicates: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()

    @property
    def casts(self) -> bool:
        """What shards parameters computes in 16 bits itself; under the others the forward is autocast."""
        return "parameters" in self.shards
