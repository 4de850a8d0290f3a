"""The shape of Llama 3 8B at 4096 tokens: model FLOPs that a device reaches.

As a share of the 989.4 TFLOP/s of the data sheet, and of what an 8192^3 product in
bfloat16 reaches in the same run; causal attention counted half, and in full.
"""

from contestants import JAX_MEMORY

from zjax.bench import Case, Contest, Contestant, Row

BARS = {"mfu": 0.5, "mfu_full_attention": 0.53}
"""Of the data sheet's peak."""
MATMUL_BARS = {"matmul_share": 0.626, "matmul_share_full_attention": 0.664}
"""Of the measured product: the same speed where that reaches 790 TFLOP/s."""
COUNTS = ("causal attention", "full attention")
TRIALS = {
    "zjax ZeRO-2 with 4 sequences": ("zero.stage=2", "microbatch_size=4"),
}


def get_contest():
    script = ("{python}", "examples/benchmarks/matmul_share.py", "configs/llama_8b.py")
    contestants = tuple(
        Contestant(name, (*script, "global_batch_size=0", *changes), "zjax", JAX_MEMORY)
        for name, changes in TRIALS.items()
    )

    def cases(bars, what):
        for (metric, bar), count in zip(bars.items(), COUNTS, strict=True):
            yield Case(
                ours=tuple(TRIALS),
                peer=bar,
                metric=metric,
                unit=f"of {what}",
                must=1.0,
                name=f"{count}, {what}",
                peer_name="stated bar",
            )

    row = Row(
        "mfu_llama8b",
        "Llama 8B shape: a device reaches the stated share of its peak.",
        (*cases(BARS, "989.4 TFLOP/s"), *cases(MATMUL_BARS, "8192^3 product")),
        notes="N is without the input table, which is looked up",
        by_devices=False,
    )
    return Contest("Llama 8B shape, 4096 tokens", contestants, (row,))
