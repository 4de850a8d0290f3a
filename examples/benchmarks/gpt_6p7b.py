"""GPT 6.7B, 2 x 4096 tokens per device: speed and memory of ZeRO 2 and 3."""

from contestants import compare_speed, deepspeed, fsdp, zjax
from contests import Case, Contest, Row
from shape import GPT_6P7B

SHAPE = GPT_6P7B
SETTINGS = (
    f"microbatch_size={SHAPE.microbatch_size}",
    "global_batch_size=0",
    "model.remat=elementwise",
)
OURS = ("zjax ZeRO-2", "zjax ZeRO-3")
LEAVES = "DeepSpeed ZeRO-3 compiled leaves"
KEPT, RESHARDED = "FSDP2 parameters kept", "FSDP2 resharded"


def get_contest():
    contestants = (
        zjax(OURS[0], "configs/gpt_6p7b.py", *SETTINGS, "zero.stage=2"),
        zjax(OURS[1], "configs/gpt_6p7b.py", *SETTINGS, "zero.stage=3"),
        deepspeed("DeepSpeed ZeRO-2 compiled", SHAPE, 2, "blocks_and_loss"),
        deepspeed(LEAVES, SHAPE, 3, "forwards_and_loss", "--leaf_blocks"),
        fsdp(KEPT, SHAPE, reshard=False),
        fsdp(RESHARDED, SHAPE, reshard=True),
    )

    def peak(name, ours, peer):
        sides = ((ours,), (peer,))
        return Case(*sides, "peak_bytes", "bytes", must=1.05, aim=0.9, name=name)

    rows = (
        Row(
            "zero2_6p7b",
            "GPT 6.7B: ZeRO-2 is faster than DeepSpeed's.",
            compare_speed(OURS[:1], ("DeepSpeed ZeRO-2 compiled",), 1.08, 1.2),
        ),
        Row(
            "zero3_6p7b",
            "GPT 6.7B: ZeRO-3 is faster than DeepSpeed's.",
            compare_speed(OURS[1:], (LEAVES,), 1.15, 1.25),
        ),
        Row(
            "fsdp_6p7b",
            "GPT 6.7B: the best stage is as fast as FSDP2's best.",
            compare_speed(OURS, (KEPT, RESHARDED), 1.02, 1.1),
        ),
        Row(
            "peak_memory_6p7b",
            "GPT 6.7B: a step takes no more memory than FSDP2's.",
            (
                peak("ZeRO-2 and parameters kept", OURS[0], KEPT),
                peak("ZeRO-3 and resharded", OURS[1], RESHARDED),
            ),
            theme="memory",
            higher_is_better=False,
            by_devices=False,
        ),
    )
    return Contest("GPT 6.7B, 2 x 4096 tokens per device", contestants, rows)
