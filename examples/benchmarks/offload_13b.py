"""GPT 13B on one device with 32 GB of memory: all state and parameters on the host.

16 x 1024 tokens per step, blocks recomputed in full; the host has 256 GiB or more.
"""

from zjax.bench import Case, Contest, Contestant, Row

NAME = "zjax"
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
    "zero.gradient_memory=pinned_host",
)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2122",  # 32 GB of an H200
}


def get_contest():
    script = ("{python}", "examples/benchmarks/matmul_share.py", "configs/gpt_6p7b.py")
    contestant = Contestant(
        NAME, (*script, *GPT_13B), "zjax", ENVIRONMENT, timeout_seconds=560
    )
    case = Case(
        ours=(NAME,),
        peer=1.0,
        metric="matmul_share",
        unit="of the 8192^3 product",
        must=0.15,
        aim=0.35,
        peer_name="8192^3 product",
    )
    row = Row(
        "offload_13b_32gb",
        "GPT 13B trains in 32 GB of device memory.",
        (case,),
        by_devices=False,
    )
    return Contest("GPT 13B in 32 GB", (contestant,), (row,))
