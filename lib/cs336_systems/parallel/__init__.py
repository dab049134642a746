"""Several processes at once: starting them, and what trains a module in them."""

from cs336_systems.parallel.ddp import DataParallel, FlatDDP, NaiveDDP, start_mean
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.parallel.launch import WorkerContext, WorkerError, backends_here, launch, stream
from cs336_systems.parallel.overlapped import BucketedDDP, OverlappedDDP, bucket_bytes
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer
from cs336_systems.parallel.shards import (
    fill_buckets,
    partition_tensors,
    segment_bytes,
)
from cs336_systems.parallel.strategies import SHARDINGS, TorchDDP, wrapper
from cs336_systems.parallel.tensor_parallel import TensorParallelSwiGLU
