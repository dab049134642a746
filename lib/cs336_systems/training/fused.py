"""A TransformerLM that runs on the fused kernels: its modules change their class, and nothing else.

    use_fused_kernels(model)
    loss = model(token_ids, targets)      # without targets: the logits, as before

Parameters, their names and the state dict stay; what wraps modules by their type still finds them, because
every class here is a subclass of the plain one.
"""

from torch import Tensor
from torch.nn import functional as F

from cs336_systems.kernels.rms_norm import rms_norm
from cs336_systems.kernels.rotary import rotary
from cs336_systems.kernels.swiglu import swiglu
from cs336_systems.model import Linear, RMSNorm, RotaryEmbedding, SwiGLU, TransformerLM
from cs336_systems.training.linear_cross_entropy import linear_cross_entropy


class FusedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FusedRotaryEmbedding(RotaryEmbedding):
    def forward(self, x: Tensor) -> Tensor:
        return rotary(x, self.cos, self.sin)


class FusedSwiGLU(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class LossHead(Linear):
    """Logits of hidden states; of hidden states and targets the loss, and then no logits are kept."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight) if targets is None else linear_cross_entropy(x, self.weight, targets)


class FusedTransformerLM(TransformerLM):
    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """(b, s) token ids -> (b, s, vocab_size) logits; with (b, s) targets, the mean loss."""
        if targets is None:
            return super().forward(token_ids)
        x = self.embed(token_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_final(x), targets)


_FUSED: dict[type, type] = {
    RMSNorm: FusedRMSNorm,
    RotaryEmbedding: FusedRotaryEmbedding,
    SwiGLU: FusedSwiGLU,
}


def use_fused_loss(model: TransformerLM) -> TransformerLM:
    """Change, in place, the class of the model and of its last layer: with targets, no logits are held."""
    model.__class__, model.lm_head.__class__ = FusedTransformerLM, LossHead
    return model


def use_fused_kernels(model: TransformerLM) -> TransformerLM:
    """Change, in place, the class of every module of the model that has a fused one; return the model."""
    for module in model.modules():
        module.__class__ = _FUSED.get(type(module), type(module))
    return use_fused_loss(model)
