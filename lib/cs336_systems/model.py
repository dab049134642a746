"""The Transformer language model of the assignment: pre-norm, RMSNorm, rotary positions, SwiGLU.

Shapes: batch b, sequence s, heads h, head width d_head. Every module that owns numbers has
`reset_parameters()`, so that a model built on the meta device can be filled later. `factory` is the device
and dtype of parameters.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from cs336_systems.arguments import check_positive_integers
from cs336_systems.attention import attention
from cs336_systems.configs import ModelConfig
from cs336_systems.functional import cross_entropy, rms_norm, rotary, silu

Device = torch.device | str | None
DType = torch.dtype | None


@torch.no_grad()
def _truncated_normal_(weight: Tensor, std: float) -> None:
    """Fill from a normal cut off at three standard deviations, through the inverse of its distribution.

    In place, on the weight's device and without a look at the values, so ten billion take no time on a GPU.
    `nn.init.trunc_normal_` does the same or draws again and again, depending on the version of torch.
    """
    edge = math.erf(3 / math.sqrt(2))
    weight.uniform_(-edge, edge).erfinv_().mul_(math.sqrt(2) * std).clamp_(-3 * std, 3 * std)


class Linear(nn.Module):
    """y = x W^T without a bias; W is (d_out, d_in)."""

    def __init__(self, d_in: int, d_out: int, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        d_out, d_in = self.weight.shape
        _truncated_normal_(self.weight, std=math.sqrt(2 / (d_in + d_out)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """Row `i` of the (n, d) weight for every integer `i` of the input."""

    def __init__(self, n: int, d: int, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, d, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _truncated_normal_(self.weight, std=1.0)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """`functional.rms_norm`, its weight (d,)."""

    norm = staticmethod(rms_norm)

    def __init__(self, d: int, eps: float = 1e-5, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """`functional.rotary` by the angle p * theta^(-2k/d) at position p.

    One instance serves every layer. Its two tables, (context_length, d_head / 2), are not learnt and so stay
    out of the state dict; they are float32 whatever the parameters are.
    """

    rotate = staticmethod(rotary)

    def __init__(
        self, context_length: int, d_head: int, theta: float = 10_000.0, *, device: Device = None
    ):
        super().__init__()
        if d_head % 2:
            raise ValueError(f"rotary positions turn pairs, so d_head must be even; got {d_head}")
        self.d_head = d_head
        self.theta = theta
        for name in ("cos", "sin"):
            table = torch.empty(context_length, d_head // 2, device=device, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        options = {"device": self.cos.device, "dtype": torch.float32}
        frequencies = self.theta ** -(torch.arange(0, self.d_head, 2, **options) / self.d_head)
        angles = torch.arange(len(self.cos), **options)[:, None] * frequencies
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """Behind .to(), .half(), to_empty() and the like: tables change their device, nothing else.

        Where they had numbers these are taken again, as `fn` may have cast them; where they leave the meta
        device they get their first ones, in the dtype that they were cast to there, if they were.
        """
        tables = self.cos, self.sin
        super()._apply(fn, recurse)
        if not tables[0].is_meta:
            self.cos, self.sin = (table.to(self.cos.device) for table in tables)
        elif not self.cos.is_meta:
            self.reset_parameters()
        return self

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions of x (..., s, d), counted from 0.

        Raises:
            ValueError: x has more positions than the tables.
        """
        positions = x.shape[-2]
        if positions > len(self.cos):
            most = len(self.cos)
            raise ValueError(
                f"x has {positions} positions; allowed: at most {most}, the context length"
            )
        # A model that was made on the meta device: load_state_dict(assign=True) fills parameters alone.
        # to_empty() goes through `_apply`, which fills the tables.
        if self.cos.is_meta and not x.is_meta:
            self.to_empty(device=x.device)
        return self.cos[:positions], self.sin[:positions]

    def forward(self, x: Tensor) -> Tensor:
        """(..., s, d_head) -> the same shape and type."""
        return self.rotate(x, *self.tables(x))


class CausalSelfAttention(nn.Module):
    """Multi-head attention of every position over itself and its past."""

    def __init__(
        self, d_model: int, num_heads: int, rope: RotaryEmbedding, attention_implementation: str = "plain",
        **factory: Any,
    ):  # fmt: skip
        super().__init__()
        self.num_heads = num_heads
        self.attention_implementation = attention_implementation
        self.rope = rope
        for name in ("q_proj", "k_proj", "v_proj", "output_proj"):
            setattr(self, name, Linear(d_model, d_model, **factory))

    def forward(self, x: Tensor) -> Tensor:
        projections = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = map(self._split_heads, projections)
        q = self.rope(q)
        k = self.rope(k)
        heads = attention(q, k, v, is_causal=True, implementation=self.attention_implementation)
        concatenated = rearrange(heads, "... h s d_head -> ... s (h d_head)")
        return self.output_proj(concatenated)

    def _split_heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "... s (h d_head) -> ... h s d_head", h=self.num_heads)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x): a feed-forward layer with a gate (Shazeer 2020)."""

    gate = None

    def __init__(self, d_model: int, d_ff: int, **factory: Any):
        super().__init__()
        self.w1 = Linear(d_model, d_ff, **factory)
        self.w2 = Linear(d_ff, d_model, **factory)
        self.w3 = Linear(d_model, d_ff, **factory)

    def forward(self, x: Tensor) -> Tensor:
        # In one expression: a name, or a function of both, would keep w1 x alive.
        if self.gate is None:
            return self.w2(silu(self.w1(x)) * self.w3(x))
        return self.w2(self.gate(self.w1(x), self.w3(x)))


def run_block(block: "TransformerBlock", x: Tensor) -> Tensor:
    """Attention, then feed-forward; each reads a normalised copy of the residual stream and adds to it."""
    x = x + block.attn(block.ln1(x))
    return x + block.ffn(block.ln2(x))


class TransformerBlock(nn.Module):
    """(..., s, d_model) -> the same shape: `run_block`."""

    run = staticmethod(run_block)

    def __init__(
        self, d_model: int, num_heads: int, d_ff: int, rope: RotaryEmbedding, *,
        attention_implementation: str = "plain", **factory: Any,
    ):  # fmt: skip
        super().__init__()
        self.ln1 = RMSNorm(d_model, **factory)
        self.attn = CausalSelfAttention(
            d_model, num_heads, rope, attention_implementation, **factory
        )
        self.ln2 = RMSNorm(d_model, **factory)
        self.ffn = SwiGLU(d_model, d_ff, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class TransformerLM(nn.Module):
    """Token ids in, logits of the next token out.

    What RMSNorm, RotaryEmbedding, SwiGLU and TransformerBlock compute with (`norm`, `rotate`, `gate`, `run`)
    is an attribute: `training.fused` puts kernels there.

    Args:
        context_length: the longest sequence it will be given; only the rotary tables depend on it.
        attention_implementation: which attention the blocks call, see `cs336_systems.attention`.
        device, dtype: where the parameters are made, and their type (default: torch's defaults).

    Raises:
        ValueError: a dimension is no positive integer, or num_heads does not divide d_model into even heads.
    """

    def __init__(
        self, vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int, d_ff: int,
        rope_theta: float = 10_000.0, *,
        attention_implementation: str = "plain", device: Device = None, dtype: DType = None,
    ):  # fmt: skip
        super().__init__()
        sizes = {"vocab_size": vocab_size, "context_length": context_length, "d_model": d_model}
        check_positive_integers(**sizes, num_layers=num_layers, num_heads=num_heads, d_ff=d_ff)
        if d_model % num_heads:
            raise ValueError(
                f"num_heads must divide d_model; got d_model={d_model}, num_heads={num_heads}"
            )
        factory = {"device": device, "dtype": dtype}
        options = factory | {"attention_implementation": attention_implementation}
        rope = RotaryEmbedding(context_length, d_model // num_heads, rope_theta, device=device)
        self.token_embeddings = Embedding(vocab_size, d_model, **factory)
        self.layers = nn.ModuleList(
            TransformerBlock(d_model, num_heads, d_ff, rope, **options) for _ in range(num_layers)
        )
        self.ln_final = RMSNorm(d_model, **factory)
        self.lm_head = Linear(d_model, vocab_size, **factory)

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """(b, s) integers -> (b, s, vocab_size) logits, or with (b, s) targets the mean loss.

        Raises:
            ValueError: the sequence is longer than the context length the model was built for.
        """
        x = self.token_embeddings(token_ids)
        for layer in self.layers:
            x = layer(x)
        hidden = self.ln_final(x)
        if targets is None:
            return self.lm_head(hidden)
        # A LossHead, which training.fused puts there, makes the loss itself, without all logits.
        if getattr(self.lm_head, "takes_targets", False):
            return self.lm_head(hidden, targets)
        return cross_entropy(self.lm_head(hidden), targets)


def build_model(config: ModelConfig, context_length: int, **options: Any) -> TransformerLM:
    """A size of `configs`, freshly initialised; options: attention_implementation, device, dtype."""
    return TransformerLM(
        config.vocab_size, context_length, config.d_model, config.num_layers, config.num_heads,
        config.d_ff, config.rope_theta, **options,
    )  # fmt: skip
