"""GPT 13B on one device with 32 GB of memory: all state and parameters on the host.

16 x 1024 tokens per step, blocks recomputed in full, no clipping, so that updates run
under the backward pass; the host has 256 GiB or more.
"""

from zjax.bench import Case, Contest, Contestant, Row

NAME, FEW_LAYERS = "zjax", "zjax with 10 layers"
GPT_13B = (
    "model.num_layers=40",
    "model.embed_size=5120",
    "model.mlp_size=20480",
    "model.num_heads=40",
    "model.num_kv_heads=40",
    "model.max_length=1024",
    "data.length=1024",
    "microbatch_size=16",
    "global_batch_size=0",
    "model.remat=full",
    "zero.stage=2",
    "zero.optimizer_memory=pinned_host",
    "zero.parameter_memory=pinned_host",
    "optimizer.clip_norm=inf",
    "precision.on_nonfinite=update",
)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2122",  # 32 GB of an H200
}


def get_contest():
    script = ("{python}", "examples/benchmarks/device_peak.py", "configs/gpt_6p7b.py")

    def contestant(name, *changes):
        command = (*script, *GPT_13B, *changes)
        return Contestant(name, command, "zjax", ENVIRONMENT, timeout_seconds=560)

    speed = Case(
        ours=(NAME,),
        peer=1.0,
        metric="matmul_share",
        unit="of the 8192^3 product",
        must=0.15,
        aim=0.35,
        peer_name="8192^3 product",
    )
    least = Case(
        ours=(NAME,),
        peer=(NAME,),
        metric="peak_bytes",
        unit="bytes",
        must=1.3,
        aim=1.1,
        name="peak",
        peer_metric="least_bytes",
        peer_name="what cannot be elsewhere",
    )
    depth = Case(
        ours=(NAME,),
        peer=(FEW_LAYERS,),
        metric="bytes_beyond_inputs",
        unit="bytes",
        must=1.0,
        name="40 layers against 10, without inputs of blocks",
    )
    rows = (
        Row(
            "offload_13b_32gb",
            "GPT 13B trains in 32 GB of device memory.",
            (speed,),
            by_devices=False,
        ),
        Row(
            "infinity_params",
            "Blocks on the host: the device holds few of them, whatever the depth.",
            (least, depth),
            higher_is_better=False,
            by_devices=False,
        ),
    )
    contestants = (contestant(NAME), contestant(FEW_LAYERS, "model.num_layers=10"))
    return Contest("GPT 13B in 32 GB", contestants, rows)
