"""GPT 6.7B on one device, optimizer state on the host: against DeepSpeed's CPU Adam.

16 x 1024 tokens per step, blocks recomputed in full, AdamW with weight decay.
"""

import json

from contestants import ONE_DEVICE, compare_speed, deepspeed, zjax
from contests import Case, Contest, Row
from shape import Shape

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
    "zero.offload=pinned_host",
)
CLIPPED = ("optimizer.clip_norm=1.0", "zero.offload.gradient_memory=pinned_host")
UNCLIPPED = ("optimizer.clip_norm=inf", "precision.on_nonfinite=update")
BARS = {"clip": (1.15, 1.4), "noclip": (1.3, 1.7)}
SUPER = {"device": "cpu", "pin_memory": True, "super_offload": True}


def get_contest():
    config = "configs/gpt_6p7b.py"
    ours = {
        "clip": zjax(
            "zjax with clipping",
            config,
            *SETTINGS,
            *CLIPPED,
            environment=ONE_DEVICE,
        ),
        "noclip": zjax("zjax", config, *SETTINGS, *UNCLIPPED, environment=ONE_DEVICE),
    }
    theirs = {
        "clip": _deepspeed("DeepSpeed compiled with clipping", "blocks_and_loss"),
        "noclip": _unclipped("DeepSpeed compiled", "blocks_and_loss"),
    }
    superoffload = _unclipped(
        "DeepSpeed SuperOffload",
        "forwards_and_loss",
        "--leaf_blocks",
        f"--zero={json.dumps({'offload_optimizer': SUPER})}",
    )

    def names(kind):
        return (ours[kind].name,), (theirs[kind].name,)

    def speed(kind):
        how = {"clip": "clipped", "noclip": "not clipped"}[kind]
        cases = compare_speed(*names(kind), *BARS[kind])
        return Row(
            f"offload_6p7b_{kind}",
            f"GPT 6.7B, host state, {how}: faster than DeepSpeed.",
            cases,
            theme="offload",
            headline=f"GPT 6.7B, state on the host, {how}: over DeepSpeed",
            by_devices=False,
        )

    def memory(kind):
        how = {"clip": "clipped", "noclip": "not clipped"}[kind]
        claim = f"GPT 6.7B, {how}: no more device memory than DeepSpeed."
        case = Case(*names(kind), "peak_bytes", "bytes", must=1.0)
        return Row(
            f"offload_6p7b_{kind}_memory",
            claim,
            (case,),
            theme="offload",
            higher_is_better=False,
            by_devices=False,
        )

    rows = (
        *(row(kind) for kind in BARS for row in (speed, memory)),
        Row(
            "offload_6p7b_super",
            "GPT 6.7B, host state: faster than SuperOffload.",
            compare_speed(names("noclip")[0], (superoffload.name,), *BARS["noclip"]),
            theme="offload",
            headline="GPT 6.7B, state on the host: over SuperOffload",
            notes="SuperOffload is of stage 3 alone",
            by_devices=False,
        ),
    )
    contestants = (*ours.values(), *theirs.values(), superoffload)
    return Contest("GPT 6.7B, optimizer state on the host", contestants, rows)


def _unclipped(name, compiled, *more):
    return _deepspeed(name, compiled, *more, "--clip_norm=0")


def _deepspeed(name, compiled, *more):
    options = ("--offload=cpu", "--recompute", *more)
    stage = 3 if "--leaf_blocks" in more else 2
    return deepspeed(name, SHAPE, stage, compiled, *options, on_one_device=True)
