"""GPT 6.7B on one device, optimizer state on the host: against DeepSpeed's CPU Adam.

16 x 1024 tokens per step, blocks recomputed in full, AdamW with weight decay.
"""

from contestants import compare_speed, deepspeed, zjax
from shape import Shape

from zjax.bench import Case, Contest, Row

SHAPE = Shape(
    num_layers=32,
    embed_size=4096,
    num_heads=32,
    vocab_size=50304,
    length=1024,
    microbatch_size=16,
)
SETTINGS = (
    f"model.max_length={SHAPE.length}",
    f"data.length={SHAPE.length}",
    f"microbatch_size={SHAPE.microbatch_size}",
    "global_batch_size=0",
    "model.remat=full",
    "zero.stage=2",
    "zero.optimizer_memory=pinned_host",
)
CLIPPED = ("optimizer.clip_norm=1.0", "zero.gradient_memory=pinned_host")
UNCLIPPED = ("optimizer.clip_norm=inf", "precision.on_nonfinite=update")
BARS = {"clip": (1.15, 1.4), "noclip": (1.3, 1.7)}


def get_contest():
    config, ones = "configs/gpt_6p7b.py", {"CUDA_VISIBLE_DEVICES": "0"}
    options = ("--offload=cpu", "--recompute")
    ours = {
        "clip": zjax(
            "zjax with clipping", config, *SETTINGS, *CLIPPED, environment=ones
        ),
        "noclip": zjax("zjax", config, *SETTINGS, *UNCLIPPED, environment=ones),
    }
    theirs = {
        "clip": deepspeed("DeepSpeed with clipping", SHAPE, 2, "none", *options),
        "noclip": deepspeed("DeepSpeed", SHAPE, 2, "none", *options, "--clip_norm=0"),
    }

    def speed(kind):
        names = (ours[kind].name,), (theirs[kind].name,)
        claim = "GPT 6.7B on one device: optimizer state on the host is faster than "
        cases = compare_speed(*names, *BARS[kind])
        return Row(
            f"offload_6p7b_{kind}", f"{claim}DeepSpeed's.", cases, by_devices=False
        )

    def memory(kind):
        names = (ours[kind].name,), (theirs[kind].name,)
        claim = "GPT 6.7B on one device: no more device memory than DeepSpeed's."
        case = Case(*names, "peak_bytes", "bytes", must=1.0)
        return Row(
            f"offload_6p7b_{kind}_memory",
            claim,
            (case,),
            higher_is_better=False,
            by_devices=False,
        )

    late = "zero.delay_updates_from=1"
    delayed = zjax(
        "zjax one step late", config, *SETTINGS, *CLIPPED, late, environment=ones
    )
    gain = Row(
        "offload_6p7b_delayed",
        "GPT 6.7B on one device: updates one step late hide clipping.",
        compare_speed((delayed.name,), (ours["clip"].name,), 1.0, None),
        notes="the numbers of a step are not those of the peer",
        by_devices=False,
    )
    contestants = (*ours.values(), delayed, *theirs.values())
    rows = (*(row(kind) for kind in BARS for row in (speed, memory)), gain)
    return Contest("GPT 6.7B, optimizer state on the host", contestants, rows)
