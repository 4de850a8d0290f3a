"""The shape of Llama 3 8B at 4096 tokens: model FLOPs that a device reaches.

As a share of the 989.4 TFLOP/s of the data sheet, and of what an 8192^3 product in
bfloat16 reaches beside it; causal attention counted half, and in full.
"""

from contestants import JAX_MEMORY, matrix_product
from contests import Case, Contest, Contestant, Row

PEAK, PRODUCT = "989.4 TFLOP/s", "8192^3 product"
COUNTS = {
    "causal attention": ("mfu", 0.5, "tflops_causal_attention", 0.626),
    "full attention": ("mfu_full_attention", 0.53, "tflops_full_attention", 0.664),
}
"""By how attention is counted: the share of the peak, and the rate over that of the
product; the same speed where the product reaches 790 TFLOP/s."""
TRIALS = {
    "zjax ZeRO-2 with 4 sequences": ("zero.stage=2", "microbatch_size=4"),
}


def get_contest():
    script = ("{python}", "examples/benchmarks/model_flops.py", "configs/llama_8b.py")
    contestants = tuple(
        Contestant(name, (*script, "global_batch_size=0", *changes), "zjax", JAX_MEMORY)
        for name, changes in TRIALS.items()
    )
    of_peak = (
        Case(
            ours=tuple(TRIALS),
            peer=bar,
            metric=share,
            unit=f"times {PEAK}",
            must=1.0,
            name=f"{count}, {PEAK}",
            peer_name="stated bar",
        )
        for count, (share, bar, _, _) in COUNTS.items()
    )
    of_product = (
        Case(
            ours=tuple(TRIALS),
            peer=(PRODUCT,),
            metric=rate,
            unit="TFLOP/s",
            must=bar,
            name=f"{count}, {PRODUCT}",
            peer_metric="product_tflops",
        )
        for count, (_, _, rate, bar) in COUNTS.items()
    )

    row = Row(
        "mfu_llama8b",
        "Llama 8B shape: a device reaches the stated share of peak.",
        (*of_peak, *of_product),
        headline="Llama 8B: share of the peak over the bar",
        notes="N is without the input table, which is looked up",
        by_devices=False,
    )
    contestants = (*contestants, matrix_product(PRODUCT))
    return Contest("Llama 8B shape, 4096 tokens", contestants, (row,))
