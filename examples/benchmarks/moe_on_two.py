"""Mixtures of experts on two devices: over one, in their memory, over a dense GPT.

The last one reads and writes all of its optimizer state in each step, in part on the
host, so that it has many microbatches; a dense GPT gains little from more than two.
"""

from contestants import ONE_DEVICE, compare_speed, zjax
from contests import Case, Contest, Row

TWO_DEVICES = {"CUDA_VISIBLE_DEVICES": "0,1"}
SMALL_STATE = ("optimizer.rule.moment_dtype=int8", "global_batch_size=0")
QWEN3 = (
    *SMALL_STATE,
    "model.num_layers=6",
    "model.remat=elementwise",
    "zero.stage=2",
    "microbatch_size=8",
)
DENSE_AND_EXPERTS = (
    *SMALL_STATE,
    "model.remat=elementwise",
    "zero.stage=2",
    "zero.offload=auto",
    "optimizer.clip_norm=inf",
    "precision.on_nonfinite=update",
    "precision.grad_sum_dtype=bfloat16",
)
"""Updates run under the last backward pass of a step."""
ALONE, BOTH = "Qwen3-30B-A3B with 6 layers on one", "Qwen3-30B-A3B with 6 layers"
LARGE = "350M with 128 experts"
EXPERTS, DENSE = "1.3B with 64 experts", "6.7B dense"
DEVICE_BYTES = 80e9


def get_contest():
    contestants = (
        zjax(
            ALONE,
            "configs/qwen3_moe_30b.py",
            *QWEN3,
            "mesh.expert=1",
            environment=ONE_DEVICE,
        ),
        _on_two(BOTH, "qwen3_moe_30b", *QWEN3, "mesh.expert=2"),
        _on_two(
            LARGE, "moe_350m_128e", *SMALL_STATE, "mesh.expert=2", "microbatch_size=4"
        ),
        _on_two(
            EXPERTS,
            "moe_1p3b_128e",
            *DENSE_AND_EXPERTS,
            "model.moe.num_experts=64",
            "mesh.expert=2",
            "microbatch_size=6",
            "num_microbatches=32",
        ),
        _on_two(
            DENSE,
            "gpt_6p7b",
            *DENSE_AND_EXPERTS,
            "model.max_length=2048",
            "microbatch_size=8",
            "num_microbatches=2",
        ),
    )
    rows = (
        Row(
            "moe_ep2",
            "Experts over two devices: each as fast as one alone.",
            compare_speed((BOTH,), (ALONE,), 0.8, 0.92),
            notes="ours on two devices over ours on one; 8 x 4096 tokens per device",
            by_devices=False,
        ),
        Row(
            "moe_13b_on_two",
            "A mixture of 13.15B parameters trains on 2 x 80 GB.",
            (
                Case(
                    ours=(LARGE,),
                    peer=DEVICE_BYTES,
                    metric="peak_bytes",
                    unit="bytes",
                    must=1.0,
                    peer_name="80 GB",
                ),
            ),
            theme="memory",
            higher_is_better=False,
            notes="peak memory of a device; nothing is offloaded, and the loss falls "
            "within 20 steps or more; DeepSpeed's table asks for 210 GB",
            by_devices=False,
        ),
        Row(
            "moe_vs_dense",
            "A mixture trains faster than a dense GPT of equal loss.",
            compare_speed((EXPERTS,), (DENSE,), 3.5, 5.0),
            headline="GPT 1.3B with 64 experts on two devices: over GPT 6.7B",
            notes="ours over ours; sequences of 2048 tokens; optimizer state that does "
            "not fit on the devices is on the host; twice as many experts need 315 GB "
            "of state; equal loss is the claim of arXiv:2201.05596 for 128 experts",
            by_devices=False,
        ),
    )
    return Contest("Mixtures of experts on two devices", contestants, rows)


def _on_two(name, config, *settings):
    return zjax(name, f"configs/{config}.py", *settings, environment=TWO_DEVICES)
