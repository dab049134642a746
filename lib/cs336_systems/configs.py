"""Every model size of both editions of the assignment: the only place where dimensions are written down."""

from dataclasses import dataclass

from cs336_systems.arguments import check_choice


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of one Transformer. Context length and batch size belong to a run, not to a model."""

    name: str
    edition: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000
    rope_theta: float = 10_000.0

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads

    def columns(self) -> dict[str, int | str]:
        """The key columns of a row about the model."""
        return {
            "edition": self.edition,
            "model_size": self.name,
            "d_model": self.d_model,
            "num_heads": self.num_heads,
        }

    @property
    def label(self) -> str:
        """Name with its edition: "xl" is two different models, so it never stands alone."""
        return f"{self.name} ({self.edition})"


# name: (d_model, d_ff, num_layers, num_heads)
_SHARED = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
}
_EDITIONS = {
    2025: _SHARED | {"xl": (1600, 6400, 48, 25), "2.7B": (2560, 10_240, 32, 32)},
    2026: _SHARED | {"xl": (2560, 10_240, 32, 32), "10B": (4608, 12_288, 50, 36)},
}
# "tiny" is not in the handout: small enough for a laptop's CPU, with the same parts as the others.
MODEL_SIZES: dict[int, dict[str, ModelConfig]] = {
    edition: {"tiny": ModelConfig("tiny", edition, 64, 192, 2, 4, vocab_size=512)}
    | {name: ModelConfig(name, edition, *dimensions) for name, dimensions in sizes.items()}
    for edition, sizes in _EDITIONS.items()
}

# The model of the 2026 leaderboard, which is trained on 32,768 tokens of context.
LEADERBOARD = ModelConfig("8B", 2026, 4096, 11_008, 34, 32, vocab_size=151_936)


def model_size(name: str, edition: int = 2025) -> ModelConfig:
    """Look up a size of one edition.

    Raises:
        ValueError: the edition, or the size in that edition, does not exist; the message lists what does.
    """
    check_choice("edition", edition, MODEL_SIZES)
    sizes = MODEL_SIZES[edition]
    check_choice(f"in edition {edition} the model size", name, sizes)
    return sizes[name]
