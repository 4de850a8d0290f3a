"""The largest GPT of width 2560 that trains in 32 GB per device: ZeRO-3 over none."""

from contests import Case, Contest, Contestant, Row

SETTINGS = (
    "model.embed_size=2560",
    "model.mlp_size=10240",
    "model.num_heads=20",
    "model.num_kv_heads=20",
    "model.vocab_size=50304",
    "model.remat=full",
    "global_batch_size=0",
    "microbatch_size=1",
)
SPLIT, WHOLE = "zjax ZeRO-3", "zjax stage 0"


def get_contest():
    script = ("{python}", "examples/benchmarks/largest_model.py", "--pool_gigabytes=32")

    def search(name, stage):
        settings = (*SETTINGS, f"zero.stage={stage}")
        command = (*script, "configs/gpt2_1p5b.py", *settings)
        return Contestant(name, command, "zjax", timeout_seconds=560)

    case = Case(
        ours=(SPLIT,),
        peer=(WHOLE,),
        metric="num_params",
        unit="parameters",
        must=3.0,
    )
    row = Row(
        "bigger_model",
        "ZeRO-3 trains a larger GPT in 32 GB than stage 0 does.",
        (case,),
        theme="memory",
        headline="Largest GPT in 32 GB: ZeRO-3 over stage 0",
        notes="1 x 1024 tokens per device, blocks recomputed; with one layer more, "
        "either ran out of memory",
        by_devices=False,
    )
    contestants = (search(WHOLE, 0), search(SPLIT, 3))
    return Contest("Largest GPT of width 2560 in 32 GB", contestants, (row,))
