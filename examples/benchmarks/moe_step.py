"""Whole steps of mixtures of experts, layers cut to fit a device: FLOPs it reaches.

As a share of the 989.4 TFLOP/s of the data sheet, causal attention counted half. Of the
experts those alone count that a token is sent to, and of the token tables the head.
"""

from contestants import ONE_DEVICE, zjax

from zjax.bench import Case, Contest, Row

SETTINGS = (
    "mesh.expert=1",
    "model.remat=elementwise",
    "optimizer.moment_dtype=int8",
    "microbatch_size=8",
    "global_batch_size=0",
)
SHAPES = {
    "Mixtral 8x7B with 3 of 32 layers": ("mixtral_8x7b", 3, 0.38, 0.50),
    "Qwen3-30B-A3B with 6 of 48 layers": ("qwen3_moe_30b", 6, 0.28, 0.40),
}
"""Config, layers, and the shares that must and should be reached."""


def get_contest():
    contestants = tuple(
        zjax(
            name,
            f"configs/{config}.py",
            f"model.num_layers={num_layers}",
            *SETTINGS,
            environment=ONE_DEVICE,
        )
        for name, (config, num_layers, _, _) in SHAPES.items()
    )
    cases = tuple(
        Case(
            ours=(name,),
            peer=must,
            metric="mfu",
            unit="of 989.4 TFLOP/s",
            must=1.0,
            aim=aim / must,
            name=name,
            peer_name="stated bar",
        )
        for name, (_, _, must, aim) in SHAPES.items()
    )
    row = Row(
        "moe_mfu",
        "Mixtures of experts: a device reaches the stated share of its peak.",
        cases,
        headline="Mixtures of experts, whole steps: share of the peak over the bar",
        notes="with so few layers the head has half of the FLOPs of Qwen3's shape, and "
        "a tenth of those of Mixtral's",
        by_devices=False,
    )
    return Contest("Mixtures of experts, 8 x 4096 tokens", contestants, (row,))
