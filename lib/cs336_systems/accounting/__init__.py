"""Closed forms: what a model costs in parameters, FLOPs, bytes and seconds before anything is measured.

Pure functions of a `ModelConfig` and numbers; a ValueError says which are allowed (a KeyError: there is no
such pass of attention alone, or collective of a ring). They describe `model.py` with plain attention; the
tests hold them against torch's FLOP counter and the storages alive during a step.
"""

from cs336_systems.accounting import checkpoint_costs, scaling, sharding_costs
from cs336_systems.accounting.attention_costs import (
    attention_flops, attention_peak_breakdown, attention_saved_bytes,
    flash_bytes, flash_flops, flash_scores,
)  # fmt: skip
from cs336_systems.accounting.collective_costs import (
    MB, bus_factor, fit_alpha_beta, fit_collective, reference_link,
)  # fmt: skip
from cs336_systems.accounting.data_sheets import hardware, machines
from cs336_systems.accounting.element_counts import Counts, dtype_bytes
from cs336_systems.accounting.flops import (
    flops_breakdown, forward_flops, parameter_breakdown,
    parameter_count, roofline_seconds, utilisation,
)  # fmt: skip
from cs336_systems.accounting.model_memory import (
    activation_bytes, parameter_bytes, peak_bytes, peak_phases, saved_by_block, saved_by_head,
)  # fmt: skip
from cs336_systems.accounting.network import ring_seconds
