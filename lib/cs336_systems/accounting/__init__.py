"""Closed forms: what a model costs in parameters, FLOPs, bytes and seconds before anything is measured.

Pure functions of a `ModelConfig` and numbers; unknown names and impossible numbers are refused: a ValueError
says what is allowed. They describe this repository's own eager model (`model.py` with plain attention); the
tests hold them against torch's FLOP counter, against the tensors that autograd really saves, and against the
storages alive during a step.
"""

from cs336_systems.lazy_exports import lazy_exports

__getattr__, __all__ = lazy_exports(
    __name__,
    {
        "attention_costs": "attention_flops attention_part_bytes attention_part_flops "
        "attention_peak_breakdown attention_peak_bytes attention_saved_bytes attention_traffic_bytes "
        "flash_bytes flash_flops flash_scores",
        "checkpoint_costs": "checkpoint_costs",
        "collective_costs": "COLLECTIVES MB AlphaBeta bus_factor fit_alpha_beta fit_collective ring_seconds "
        "torch_bucket_bytes",
        "element_counts": "DTYPE_BYTES",
        "flops": "flops_breakdown forward_flops parameter_breakdown parameter_count roofline_seconds "
        "utilisation",
        "data_sheets": "Hardware hardware hardware_names",
        "model_memory": "activation_bytes block_activation_breakdown head_activation_breakdown "
        "parameter_bytes peak_bytes peak_phases",
        "network": "Links Task collective_finish run_tasks",
        "scaling": "scaling",
        "sharding_costs": "sharding_costs",
    },
)
