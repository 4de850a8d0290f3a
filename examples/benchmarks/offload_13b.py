"""GPT 13B on one device with 32 GB of memory: all state and parameters on the host.

16 x 1024 tokens per step, blocks recomputed in full, no clipping, so that updates run
under the backward pass; the host has 256 GiB or more.
"""

from contestants import matrix_product
from contests import Case, Contest, Contestant, Row

NAME, FEW_LAYERS, PRODUCT = "zjax", "zjax with 10 layers", "8192^3 product"
LAYERS, WIDTH, HEADS, VOCABULARY = 40, 5120, 40, 50_304
ROWS, LENGTH = 16, 1024
GPT_13B = (
    f"model.num_layers={LAYERS}",
    f"model.embed_size={WIDTH}",
    f"model.mlp_size={4 * WIDTH}",
    f"model.num_heads={HEADS}",
    f"model.num_kv_heads={HEADS}",
    f"model.vocab_size={VOCABULARY}",
    f"model.max_length={LENGTH}",
    f"data.length={LENGTH}",
    f"microbatch_size={ROWS}",
    "global_batch_size=0",
    "model.remat=full",
    "zero.stage=2",
    "zero.offload=pinned_host",
    "zero.offload.parameter_memory=pinned_host",
    "optimizer.clip_norm=inf",
    "precision.on_nonfinite=update",
)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2122",  # 32 GB of an H200
}


NUM_BLOCKS = 3
"""One that runs, one on its way up and one on its way down."""
NUM_LIVE = 4 + 1 + 4 + 4 + 1
"""Numbers per token and channel in the backward pass of a feed-forward: queries, keys,
values and averages; the stream between; what enters the GELU, and what follows it or
its gradient; the gradient of what leaves."""


def block_params() -> int:
    """Of a block: its matrices, a bias each, and two norms."""
    attention = 4 * WIDTH**2 + 4 * WIDTH
    feed_forward = 2 * 4 * WIDTH**2 + (4 + 1) * WIDTH
    return attention + feed_forward + 4 * WIDTH


def other_params() -> int:
    """Of tokens, which the head shares, of positions, and of the last norm."""
    return (VOCABULARY + LENGTH + 2) * WIDTH


def least_bytes() -> int:
    """What has to be on the device in bfloat16, whoever trains this model."""
    blocks = NUM_BLOCKS * 2 * block_params()  # and their gradients
    tokens = ROWS * LENGTH * WIDTH * (LAYERS + NUM_LIVE)
    return 2 * (blocks + other_params() + tokens)


def get_contest():
    script = ("{python}", "examples/benchmarks/device_peak.py", "configs/gpt_6p7b.py")

    def contestant(name, *changes):
        command = (*script, *GPT_13B, *changes)
        return Contestant(name, command, "zjax", ENVIRONMENT, timeout_seconds=560)

    speed = Case(
        ours=(NAME,),
        peer=(PRODUCT,),
        metric="tflops_causal_attention",
        unit="TFLOP/s",
        must=0.15,
        aim=0.35,
        peer_metric="product_tflops",
    )
    least = Case(
        ours=(NAME,),
        peer=least_bytes(),
        metric="peak_bytes",
        unit="bytes",
        must=1.3,
        aim=1.1,
        name="peak",
        peer_name="what cannot be elsewhere, in closed form",
    )
    depth = Case(
        ours=(NAME,),
        peer=(FEW_LAYERS,),
        metric="bytes_beyond_inputs",
        unit="bytes",
        must=1.0,
        name="40 layers over 10, without block inputs",
    )
    rows = (
        Row(
            "offload_13b_32gb",
            "GPT 13B trains in 32 GB of device memory.",
            (speed,),
            theme="offload",
            by_devices=False,
        ),
        Row(
            "infinity_params",
            "Blocks on the host: the device holds few, at any depth.",
            (least, depth),
            theme="offload",
            higher_is_better=False,
            notes=f"closed form, in bfloat16: {NUM_BLOCKS} blocks and their gradients, "
            f"embedding and head, the input of every block, and {NUM_LIVE} numbers per "
            "token and channel in the backward pass of a feed-forward",
            by_devices=False,
        ),
    )
    contestants = (
        contestant(NAME),
        matrix_product(PRODUCT),
        contestant(FEW_LAYERS, "model.num_layers=10"),
    )
    return Contest("GPT 13B in 32 GB", contestants, rows)
