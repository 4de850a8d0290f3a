"""Whole steps of mixtures of experts, layers cut to fit a device.

The FLOPs that they reach are a share of the 989.4 TFLOP/s of the data sheet, causal
attention counted half; of the experts those alone count that a token is sent to, and of
the token tables the head. One shape also against transformers, and a GPT with experts
in every second layer against DeepSpeed.
"""

from contestants import ONE_DEVICE, compare_speed, on_one_device, size_flags, zjax
from contests import Case, Contest, Row
from shape import Shape

SETTINGS = (
    "mesh.expert=1",
    "model.remat=elementwise",
    "optimizer.rule.moment_dtype=int8",
    "microbatch_size=8",
    "global_batch_size=0",
)
QWEN3 = "Qwen3-30B-A3B with 6 of 48 layers"
SHAPES = {
    "Mixtral 8x7B with 3 of 32 layers": ("mixtral_8x7b", 3, 0.38, 0.50),
    QWEN3: ("qwen3_moe_30b", 6, 0.28, 0.40),
}
"""Config, layers, and the shares that must and should be reached."""
TRANSFORMERS = {f"transformers in {n} microbatches": n for n in (2, 4)}
GPT = Shape(
    num_layers=4,
    embed_size=2048,
    num_heads=16,
    vocab_size=50304,
    length=2048,
    microbatch_size=8,
)
NUM_EXPERTS = 64
OURS, DEEPSPEED = "zjax GPT with 64 experts", "DeepSpeed GPT with 64 experts"


def get_contest():
    contestants = (
        *(_ours(name, *given[:2]) for name, given in SHAPES.items()),
        *(
            on_one_device(
                name,
                "peer",
                "moe_step_torch",
                f"--num_microbatches={number}",
                timeout_seconds=150,
            )
            for name, number in TRANSFORMERS.items()
        ),
        _ours(
            OURS,
            "moe_1p3b_128e",
            GPT.num_layers,
            f"model.moe.num_experts={NUM_EXPERTS}",
            "model.moe.drop=position",
            "zero.stage=1",
        ),
        on_one_device(
            DEEPSPEED,
            "peer",
            "moe_step_deepspeed",
            *size_flags(GPT),
            f"--num_experts={NUM_EXPERTS}",
            "--compile=blocks_and_loss",
            is_distributed=True,
            timeout_seconds=150,
        ),
    )
    rows = (_share_of_peak(), _against_peers())
    return Contest("Mixtures of experts, whole steps", contestants, rows)


def _ours(name, config, num_layers, *settings):
    settings = (f"model.num_layers={num_layers}", *SETTINGS, *settings)
    return zjax(name, f"configs/{config}.py", *settings, environment=ONE_DEVICE)


def _share_of_peak():
    cases = tuple(
        Case(
            ours=(name,),
            peer=must,
            metric="mfu",
            unit="times 989.4 TFLOP/s",
            must=1.0,
            aim=aim / must,
            name=name,
            peer_name="stated bar",
        )
        for name, (_, _, must, aim) in SHAPES.items()
    )
    return Row(
        "moe_mfu",
        "Mixtures: a device reaches the stated share of its peak.",
        cases,
        notes="with so few layers the head has half of the FLOPs of Qwen3's shape, and "
        "a tenth of those of Mixtral's",
        by_devices=False,
    )


def _against_peers():
    return Row(
        "moe_step_vs_peers",
        "Whole steps of mixtures are faster than those of peers.",
        (
            *compare_speed((QWEN3,), tuple(TRANSFORMERS), 1.5, 2.5, name=QWEN3),
            *compare_speed((OURS,), (DEEPSPEED,), 2.0, 4.0, name="DeepSpeed's GPT"),
        ),
        headline="Mixtures, whole steps: over peers",
        notes="8 x 4096 and 8 x 2048 tokens per step; ours has int8 moments beside "
        "float32 weights, the peers have weights and moments in bfloat16",
        by_devices=False,
    )
