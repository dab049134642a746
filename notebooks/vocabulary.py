"""How names are shown: labels, colours, orders. labbook.labels runs this file when it first needs it.

Nothing that is measured imports it. A value without a colour has one of a ramp from light to dark.
"""

from cs336_systems.configs import MODEL_SIZES
from labbook.labels import Vocabulary

VOCABULARY = Vocabulary()
family = VOCABULARY.family
column = VOCABULARY.column

# value | label | colour, in the order of legends and tables
family(
    "implementation attention",
    """
    plain           | plain                    | blue
    torch_softmax   | plain, torch.softmax     | yellow
    compiled        | compiled                 | vermillion
    sdpa            | SDPA                     | grey
    sdpa_efficient  | SDPA, efficient          | orange
    sdpa_flash      | FlashAttention-2         | purple
    flex            | FlexAttention            | sky
    sdpa_cudnn      | cuDNN                    | black
    sdpa_fa4        | FlashAttention 4
    flash_pytorch   | Flash (PyTorch)          | brown
    flash_compiled  | Flash (compiled backward)| wine
    flash_triton    | Flash (ours)             | green
    flash_cute      | flash-attn-4             | vermillion
    record          | record, published        | sky
    yours           | yours
    yours_one_pass  | yours, one pass
    """,
)
family(  # a model's own code, a weighted sum, or a fused kernel
    "implementation",
    """
    eager           | eager                    | blue
    compiled        | compiled                 | vermillion
    compiled_blocks | compiled per block       | orange
    matmul          | matmul                   | purple
    triton          | Triton                   | green
    torch_chunks    | PyTorch, in chunks       | sky
    """,
)
family(
    "implementation wrapper",
    """
    naive           | naive                    | orange
    flat            | flat                     | sky
    overlapped      | overlapped               | green
    bucketed        | bucketed                 | blue
    torch           | PyTorch's DDP            | black
    """,
)
family(
    "implementation wrapper",
    """
    ddp             | DDP                      | blue
    ddp_rounded     | DDP, 16-bit messages     | yellow
    zero            | PyTorch's ZeRO           | grey
    sharded         | ShardedOptimizer         | orange
    sharded_scatter | ZeRO 1 (paper)           | vermillion
    fsdp2           | FSDP2                    | black
    fsdp_weight     | FSDP by weight           | sky
    fsdp_block      | FSDP by block            | green
    fsdp_kept       | FSDP, weights kept       | purple
    """,
)
family(  # the leaderboard's training step
    "implementation",
    """
    fsdp2_selective | FSDP2, attention kept    | black
    fsdp2_matmuls   | FSDP2, every second matmul kept | grey
    stacked_selective | ours, memory filled    | sky
    offloaded       | ours, moments on the host | green
    """,
)
family(
    "collective",
    """
    all_reduce      | all-reduce               | blue
    all_gather      | all-gather               | green
    reduce_scatter  | reduce-scatter           | orange
    broadcast       | broadcast                | purple
    all_to_all      | all-to-all               | sky
    """,
)
family(
    "dtype",
    """
    float32         | float32                  | blue
    tf32            | TF32                     | sky
    bfloat16        | bfloat16                 | vermillion
    float16         | float16                  | purple
    """,
)
family(
    "pass",
    """
    forward          | forward                 | sky
    backward         | backward                | orange
    forward_backward | forward + backward      | blue
    train_step       | train step              | black
    """,
)
family(  # of kernels, labbook.profiles.names.kernel_class
    "class",
    """
    matmul          | matmul                   | blue
    attention       | attention                | green
    softmax         | softmax                  | vermillion
    normalisation   | normalisation            | purple
    elementwise     | elementwise              | sky
    reduction       | reduction                | orange
    copy/cast       | copy/cast                | yellow
    embedding/index | embedding/index          | brown
    optimizer       | optimizer                | black
    communication   | communication            | wine
    other           | other                    | grey
    range           | range                    | silver
    neither         | neither                  | sky
    not profiled    | not profiled             | silver
    call            | call                     | green
    """,
)
family(  # of a step over ranks, what a GPU does: labbook.profiles.activity_spans; and links of notebook 55
    "doing link",
    """
    forward               | forward               | sky
    backward              | backward              | orange
    copies                | copies                | purple
    optimizer             | optimizer             | grey
    communication, hidden | communication, hidden | green
    communication, exposed | communication, exposed | vermillion
    as it is              | as it is              | green
    host memory           | host memory           | orange
    closed form           | closed form           | grey
    """,
)
family(  # what memory is used for in training
    "category",
    """
    parameters      | parameters               | blue
    gradients       | gradients                | orange
    optimizer state | optimizer state          | sky
    activations     | activations              | green
    rest            | rest                     | green
    temporary       | temporary                | vermillion
    other           | other                    | grey
    """,
)
family(  # what the time of a profiled model is a share of
    "scope",
    """
    inference          | inference          | blue
    forward + backward | forward + backward | vermillion
    training step      | training step      | green
    """,
)
family(  # the parts of attention
    "part",
    """
    scores          | scores                   | blue
    scale and mask  | scale, mask, copies      | vermillion
    softmax         | softmax                  | green
    values          | values                   | orange
    """,
)
family(  # of a forward pass: where its MFU went
    "part",
    """
    matmul at the rate | matmul at the measured rate | blue
    slow matmul        | slow matmul                 | sky
    other kernels      | other kernels               | vermillion
    idle               | idle GPU                    | grey
    """,
)
family(  # one code, compiled or not, with matmuls of a dtype
    "variant",
    """
    eager                        | eager                        | blue
    compiled                     | compiled                     | vermillion
    compiled per block           | compiled per block           | orange
    eager, TF32                  | eager, TF32                  | sky
    compiled, TF32               | compiled, TF32               | purple
    compiled per block, TF32     | compiled per block, TF32     | green
    eager, bfloat16              | eager, bfloat16              | brown
    compiled, bfloat16           | compiled, bfloat16           | black
    compiled per block, bfloat16 | compiled per block, bfloat16 | wine
    """,
)
_SIZES = [config for sizes in MODEL_SIZES.values() for config in sizes.values()]
_SIZES.sort(key=lambda config: config.num_layers * config.d_model**2)
family("model_size", "\n".join(config.name for config in _SIZES))
family("model", "\n".join(config.label for config in _SIZES))
family(
    "",
    """
    h200      | H200
    h200-x2   | H200
    sqrt_n    | every √N
    fsdp      | FSDP
    tp        | TP
    tp_halves | TP, two halves
    weights   | from one process
    replicas  | between ranks
    """,
)
family(  # what was predicted and what came out; lines of one page each: 21, 31, 32, 35, 37
    "what setup training which bucket",
    """
    measured          | measured          | blue
    predicted         | predicted         | vermillion
    most predicted    | most predicted    | vermillion
    matmuls alone     | matmuls alone     | green
    the card          | the card          | black
    peak of plain     | peak of plain     | vermillion
    plain             | plain             | blue
    torch_softmax     | plain, torch.softmax | purple
    sdpa              | SDPA              | grey
    Gloo, 2 processes | Gloo, 2 processes | sky
    Gloo, 4 processes | Gloo, 4 processes | blue
    Gloo, 6 processes | Gloo, 6 processes | wine
    NCCL, 2 GPUs      | NCCL, 2 GPUs      | orange
    NCCL, 4 GPUs      | NCCL, 4 GPUs      | vermillion
    sum, not divided  | sum, not divided  | vermillion
    shares of 3 and 1, not weighted | shares of 3 and 1, not weighted | orange
    naive, tiny, AdamW | naive, tiny, AdamW | green
    naive, tiny, SGD  | naive, tiny, SGD  | blue
    second step       | second step       | green
    first step        | first step        | grey
    100 MiB           | 100 MiB           | green
    1000 MiB          | 1000 MiB          | blue
    one for all       | one for all       | grey
    """,
)


def _tokens(count: float) -> str:
    """128, 1K, 16K."""
    return f"{count:g}" if count % 1024 else f"{count // 1024:.0f}K"


# Where its own name would not do: a column's name, what stands before its numbers ("warm-up 5"), their form.
column("std_ms", "standard deviation (ms)")
column("mean_ms", "mean time (ms)")
column("p50_ms", "median time (ms)")
column("step_ms", "time of the step (ms)")
column("no_comm_ms", "without communication (ms)")
column("compile_s", "time to compile (s)")
column("total_ms", "total time (ms)")
column("size_mib", "memory (MiB)")
column("context_length", "context length (tokens)", "context", _tokens)
column("batch_size", short="batch")
column("d_head", "head dimension", "d =")
column("is_causal", "causal")
column("num_rows", "rows", text="{:,.0f}".format)
column("world_size", "processes")
column("compared", "comparison")
column("value", "times and shares")
column("step_index", "step")
column("sm_clock_mhz", "SM clock (MHz)")
column("message_mb", "size of the message (MiB)")
column("bucket_size_mb", "bucket size (MiB)")
column("half_bandwidth_mb", "half bandwidth (MiB)")
column("sent_mb", "sent (MiB)")
column("warmup_steps", "warm-up steps", "warm-up")
# "xl" is two different models, so a size never stands alone.
VOCABULARY.derived("model", "model_size edition", "{} ({:.0f})".format)
