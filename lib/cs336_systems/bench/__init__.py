"""What is swept for each family of problems. A bench yields rows of one table; its caller saves them."""

from cs336_systems.lazy_exports import lazy_exports

__getattr__, __all__ = lazy_exports(
    __name__,
    {
        "drift_bench": "training_drift",
        "overlap_bench": "profile_lanes profile_overlap profile_steps timeline_rows",
        "sent_bytes": "RINGS count_ring_bytes count_sent_bytes",
        "step_logs": "log_messages",
    },
)
