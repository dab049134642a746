"""The training step of the leaderboard on one rank: a model put together by a FullStep, and its optimizer.

    parts = FULL_STEPS["offloaded"]
    run = ShardedModel(parts, config, batch, context, parallel.SHARDINGS[parts.sharding].wrap)
    rows = list(first_losses(run))
    run.train_step()

Who shards is handed in, as `parallel` is built on this room and not the other way round.
"""

import importlib.util
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import attention
from torch.optim import AdamW

from cs336_systems.attention.implementations import OURS, sdpa_backend
from cs336_systems.configs import ModelConfig
from cs336_systems.dtypes import torch_dtype
from cs336_systems.model import build_model
from cs336_systems.nvtx import annotate
from cs336_systems.training.full_steps import FullStep

# Of the handout's leaderboard; every step here is PyTorch's fused AdamW.
SETTINGS = {"lr": 1e-4, "fused": True}

Block = list[nn.Parameter]


class Rank(Protocol):
    """What a launcher hands to each rank: parallel.WorkerContext."""

    rank: int
    world_size: int
    device: torch.device


class Batch(NamedTuple):
    """Of all ranks together; dtype is what blocks compute in, "float32" or "bfloat16"."""

    size: int
    context_length: int
    dtype: str


class OffloadedAdamW:
    """AdamW, for which the moments of some blocks are in the host's memory, and visit the GPU once a step.

    Of a parameter a rank's GPU holds 12 bytes all the time, 8 of them moments that are needed only when the
    gradient is there. A block is updated during backward, when its last gradient has come: so gradients
    cannot be clipped by the norm of all, nor a step be skipped.

    Args:
        parameters: all that are trained.
        away: for each block that is offloaded its parameters, the one whose gradient comes last at the end.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], away: list[Block]):
        gone = {p for block in away for p in block}
        self.stays = AdamW([p for p in parameters if p not in gone], **SETTINGS)
        on_gpu = any(p.is_cuda for p in gone)
        # Of high priority: updates that wait for backward's kernels hold their moments' memory for longer.
        self.stream = torch.cuda.Stream(priority=-1) if on_gpu else None
        self.blocks: list[tuple[AdamW, dict]] = []
        for number, block in enumerate(away):
            optimizer = AdamW(block, **SETTINGS)
            for p in block:
                optimizer.state[p]["step"] = torch.zeros((), device=p.device)
            self.blocks.append((optimizer, _moments(block)))
            block[-1].register_post_accumulate_grad_hook(_visit(self, number))

    def visit(self, number: int) -> None:
        """Called when the block has its gradients: its moments come, it is updated, and they go back."""
        optimizer, moments = self.blocks[number]
        if self.stream:
            # The gradients are queued on backward's stream, and may not have been computed yet.
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for p, states in moments.items():
                for name, state in states.items():
                    optimizer.state[p][name] = state.to(p.device, non_blocking=True)
            optimizer.step()
            for p, states in moments.items():
                for name, state in states.items():
                    state.copy_(optimizer.state[p].pop(name), non_blocking=True)

    def step(self) -> None:
        """Update all others, and let what comes next wait for what is still on its way."""
        self.stays.step()
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)


def _moments(block: Block) -> dict[nn.Parameter, dict[str, Tensor]]:
    """AdamW's, on the host. Pinned: only such memory is copied while the GPU computes."""
    moments = {}
    for p in block:
        first = torch.zeros(p.shape, pin_memory=p.is_cuda)
        second = torch.zeros(p.shape, pin_memory=p.is_cuda)
        moments[p] = {"exp_avg": first, "exp_avg_sq": second}
    return moments


def _visit(optimizer: OffloadedAdamW, number: int) -> Callable[[Tensor], None]:
    # A hook that held the optimizer, which holds its parameter, would keep both in memory for ever.
    reference = weakref.ref(optimizer)

    def hook(_: Tensor) -> None:
        if (alive := reference()) is not None:
            alive.visit(number)

    return hook


class ShardedModel:
    """A model on one rank, its optimizer, and this rank's share of a batch of random tokens.

    Weights and tokens are the same in every process and of every FullStep: what is compared trains alike.

    Args:
        parts: one of FULL_STEPS.
        wrap: shards a model, called as wrap(model, dtype to compute in, or None for float32).
        whole: see `FullStep.wrap_blocks`.
    """

    def __init__(
        self,
        parts: FullStep,
        config: ModelConfig,
        batch: Batch,
        context: Rank,
        wrap: Callable[[nn.Module, torch.dtype | None], nn.Module],
        whole: int = 0,
    ):
        torch.manual_seed(0)
        self.world_size = context.world_size
        self.device = context.device
        # Which of PyTorch's kernels attends is chosen around the steps, by `attending`.
        attends = OURS if parts.keeps is None else "sdpa"
        self.net = build_model(
            config, batch.context_length, attention_implementation=attends, device=self.device
        )
        parts.prepare(self.net)
        parts.wrap_blocks(self.net, whole)
        dtype = torch_dtype(batch.dtype)
        self.model = wrap(self.net, None if dtype == torch.float32 else dtype)
        away = offloaded(self.net) if parts.offloads else []
        self.optimizer = OffloadedAdamW(self.model.parameters(), away)
        shape = (2, batch.size, batch.context_length)
        sequences = torch.randint(config.vocab_size, shape, device=self.device)
        self.tokens, self.targets = sequences.chunk(context.world_size, 1)[context.rank]

    def forward_backward(self) -> Tensor:
        """Gradients on their ranks; returns this rank's loss."""
        self.model.zero_grad(set_to_none=True)
        with annotate("forward"):
            loss = self.model(self.tokens, self.targets)
        with annotate("backward"):
            loss.backward()
        with annotate("communication"):
            self.model.finish_gradient_synchronization()
        return loss.detach()

    def train_step(self) -> None:
        """Forward, backward and AdamW."""
        self.forward_backward()
        with annotate("optimizer"):
            self.optimizer.step()

    def keep(self, counts: Mapping[str, int]) -> None:
        """Let the last blocks keep so many of each of fused_block.KEEPABLE: backward begins with them."""
        for after, layer in enumerate(reversed(self.net.layers)):
            layer.keep = {name for name, count in counts.items() if after < count}


def offloaded(net: nn.Module) -> list[Block]:
    """Whose moments travel: matrices, by block. Not the first block's: nothing would hide its copies."""
    away = []
    for block in net.layers[1:]:
        away.append([p for p in block.parameters() if p.dim() > 1])
    if away:
        # The head's gradient comes when memory is fullest. By the block halfway activations have left room.
        away[len(away) // 2].insert(0, net.lm_head.weight)
    return away


def gradient_norm(run: ShardedModel) -> float:
    """Of the whole gradient, whatever shards it."""
    if hasattr(run.model, "clip_grad_norm_"):
        return run.model.clip_grad_norm_(float("inf")).item()
    gradients = [p.grad for p in run.model.parameters()]
    norm = nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):
        # FSDP2's is a DTensor: each rank has the norm of its shards.
        norm = norm.full_tensor()
    return norm.item()


def first_losses(run: ShardedModel, steps: int = 3) -> Iterator[dict[str, Any]]:
    """Train for some steps; of each a row of full_step_losses: the mean over the ranks, in nats."""
    for step_index in range(1, steps + 1):
        loss = run.forward_backward()
        dist.all_reduce(loss)
        mean = loss.item() / run.world_size
        norm = gradient_norm(run)
        run.optimizer.step()
        yield {"step_index": step_index, "loss": mean, "gradient_norm": norm}


def fill(room: float, sizes: Mapping[str, int], layers: int) -> dict[str, int]:
    """How many blocks keep each tensor, in `room` bytes. The largest first, as bytes of all save alike."""
    counts = {}
    for name in sorted(sizes, key=sizes.get, reverse=True):
        fitting = int(room // sizes[name])
        counts[name] = max(0, min(layers, fitting))
        room -= counts[name] * sizes[name]
    return counts


def attention_of(parts: FullStep, device_type: str) -> str:
    """Ours, or what FSDP2 attends by: FlashAttention 4 where it is installed and runs, else cuDNN's."""
    if parts.keeps is None:
        return OURS
    if device_type != "cuda":
        return "sdpa"
    has_fa4 = (
        hasattr(attention, "activate_flash_attention_impl")
        and torch.cuda.get_device_capability()[0] in (9, 10)
        and importlib.util.find_spec("flash_attn")
        and importlib.util.find_spec("flash_attn.cute")
    )
    return "sdpa_fa4" if has_fa4 else "sdpa_cudnn"


@contextmanager
def attending(name: str) -> Iterator[None]:
    """Let PyTorch's attention be this one, of `attention_of`.

    "sdpa_fa4" has FlashAttention 4 in place of the kernels behind "sdpa_flash", of which it switches on the
    backend; "sdpa_cudnn" switches on its own; ours and "sdpa" change nothing. An exception inside leaves
    FlashAttention 4 in place: a rank ends with it.
    """
    if name == "sdpa_fa4":
        attention.activate_flash_attention_impl("FA4")
        # Now the backend. `attention_of` never says this name: in the end it tells that FA4 was activated.
        name = "sdpa_flash"
    with sdpa_backend(name):
        yield
    if name == "sdpa_flash":
        attention.restore_flash_attention_impl()
