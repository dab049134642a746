"""What "correct" means, for ours and for yours: attention, weighted sums, parallelism."""

from cs336_systems.checks.accuracy import check_weighted_sum
from cs336_systems.checks.attention_checks import (
    BASIC,
    AttentionCase,
    check_attention,
    check_logsumexp,
)
from cs336_systems.checks.ddp_checks import check_ddp
from cs336_systems.checks.exercise import autocast_seen, formula, step, waits
from cs336_systems.checks.fsdp_checks import check_fsdp
from cs336_systems.checks.ring_checks import check_ring, run_ring
from cs336_systems.checks.sharded_optimizer_checks import check_sharded_optimizer
from cs336_systems.checks.tensor_parallel_checks import (
    check_gather_linear,
    check_sums,
    check_tensor_parallel,
)
from cs336_systems.kernels import HAS_TRITON

if HAS_TRITON:
    from cs336_systems.checks import interpreted
    from cs336_systems.checks.flash_steps import (
        check_backward, check_forward, check_gradients, check_mask, check_visit,
    )  # fmt: skip
    from cs336_systems.checks.planted import planted
