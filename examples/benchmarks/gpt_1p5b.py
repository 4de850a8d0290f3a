"""GPT-2 1.5B, 16 x 1024 tokens per device: ZeRO 1 to 3 against DeepSpeed and FSDP2.

Also how the speed holds on more devices, and what the state takes at every stage.
"""

import functools
import json

from contestants import ONE_DEVICE, compare_speed, deepspeed, fsdp, zjax
from contests import Case, Contest, Row
from shape import Shape

STAGES = (0, 1, 2, 3)
SHAPE = Shape(
    num_layers=48,
    embed_size=1600,
    num_heads=25,
    vocab_size=50304,
    length=1024,
    microbatch_size=16,
)
SETTINGS = (
    f"model.vocab_size={SHAPE.vocab_size}",
    f"microbatch_size={SHAPE.microbatch_size}",
    "global_batch_size=0",
    "model.remat=elementwise",
)

KEEP_PARAMS = {
    "stage3_prefetch_bucket_size": 200_000_000,
    "stage3_param_persistence_threshold": 1_000_000,
    "stage3_max_live_parameters": 4_000_000_000,
    "stage3_max_reuse_distance": 4_000_000_000,
}
"""DeepSpeed stage 3 keeps parameters between the forward and the backward pass."""
LEAVES = ("forwards_and_loss", "--leaf_blocks", f"--zero={json.dumps(KEEP_PARAMS)}")
PEERS = {
    1: ("DeepSpeed ZeRO-1 compiled", ("blocks_and_loss",)),
    2: ("DeepSpeed ZeRO-2 DeepCompile", ("none", "--deepcompile")),
    3: ("DeepSpeed ZeRO-3 compiled leaves kept", LEAVES),
}
"""DeepSpeed at its fastest; docs/benchmarks/speed.md lists what else was tried."""
KEPT, AHEAD = "FSDP2 parameters kept", "FSDP2 parameters kept and prefetched"
ALONE = "zjax on one device"


def get_contest():
    ours = tuple(_zjax(f"zjax ZeRO-{stage}", stage) for stage in STAGES)
    alone = _zjax(ALONE, 2, ONE_DEVICE)
    theirs = (
        *(deepspeed(name, SHAPE, stage, *how) for stage, (name, how) in PEERS.items()),
        fsdp(KEPT, SHAPE, reshard=False),
        fsdp(AHEAD, SHAPE, "--prefetch=2", reshard=False),
    )
    best = tuple(contestant.name for contestant in ours[1:])
    rows = (
        *(_against_deepspeed(stage, name) for stage, (name, _) in PEERS.items()),
        Row(
            "fsdp_1p5b",
            "GPT 1.5B: ZeRO-2 or 3 is as fast as FSDP2.",
            compare_speed(best[1:], (KEPT, AHEAD), 1.02, 1.1),
            headline="GPT 1.5B: over FSDP2",
        ),
        Row(
            "weak_scaling",
            "GPT 1.5B, ZeRO-2: more devices are each as fast as one.",
            compare_speed(("zjax ZeRO-2",), (ALONE,), 0.95, 0.98),
            notes="ours on all devices over ours on one",
            by_devices=False,
        ),
        Row(
            "zero_memory",
            "GPT 1.5B: state takes the bytes of the closed form.",
            tuple(_state_bytes(stage) for stage in STAGES),
            theme="memory",
            higher_is_better=False,
            notes="K Psi / N with K = 12: master weights and both moments; gradients "
            "and parameters in use live only within a step",
            by_devices=False,
        ),
    )
    title = "GPT 1.5B, 16 x 1024 tokens per device"
    return Contest(title, (*ours, *theirs, alone), rows)


def _zjax(name, stage, environment=None):
    settings = (*SETTINGS, f"zero.stage={stage}")
    return zjax(name, "configs/gpt2_1p5b.py", *settings, environment=environment)


def _against_deepspeed(stage, name):
    bars = {1: (1.05, 1.15), 2: (1.05, 1.15), 3: (1.3, 1.5)}
    cases = compare_speed((f"zjax ZeRO-{stage}",), (name,), *bars[stage])
    claim = f"GPT 1.5B: ZeRO-{stage} is faster than DeepSpeed's."
    headline = f"GPT 1.5B: ZeRO-{stage} over DeepSpeed" if stage > 1 else ""
    return Row(f"zero{stage}_1p5b", claim, cases, headline=headline)


def closed_form_bytes(stage: int, num_devices: int) -> float:
    """K Psi / N of the ZeRO paper (arXiv:1910.02054, figure 1) with Adam's K = 12."""
    return 12 * SHAPE.num_params / (num_devices if stage else 1)


def _state_bytes(stage):
    name = f"zjax ZeRO-{stage}"
    return Case(
        ours=(name,),
        peer=functools.partial(closed_form_bytes, stage),
        metric="state_bytes",
        unit="bytes",
        must=1.03,
        aim=1.01,
        name=f"stage {stage}",
        peer_name="closed form",
    )
