"""`zjax tune` against settings found by hand: GPT-2 1.5B on one device.

Both train 16 sequences of 1,024 tokens a step.
"""

from contestants import ONE_DEVICE, compare_speed, on_one_device, zjax
from contests import Case, Contest, Row

RUN = ("model.vocab_size=50304", "data.source=synthetic", "data.path=")
BATCH = "global_batch_size=16"
BY_HAND = ("microbatch_size=16", "global_batch_size=0", "model.remat=elementwise")
TUNED, HAND = "zjax tuned", "zjax by hand"


def get_contest():
    contestants = (
        on_one_device(TUNED, "zjax", "tune_speed", *RUN, BATCH, timeout_seconds=1_200),
        zjax(
            HAND,
            "configs/gpt2_1p5b.py",
            *RUN,
            *BY_HAND,
            environment=ONE_DEVICE,
        ),
    )
    trials = Case(
        ours=(TUNED,),
        peer=1.0,
        metric="trials",
        unit="trials",
        must=8,
        aim=4,
        peer_name="one trial",
    )
    rows = (
        Row(
            "tune",
            "GPT 1.5B: settings of `zjax tune` are as fast as by hand.",
            compare_speed((TUNED,), (HAND,), 0.98, 1.0),
            headline="GPT 1.5B: tuned over by hand",
            notes="by hand: a microbatch of 16 and elementwise recomputation, the "
            "fastest of this page",
            by_devices=False,
        ),
        Row(
            "tune_trials",
            "GPT 1.5B: `zjax tune` needs few trials.",
            (trials,),
            higher_is_better=False,
            by_devices=False,
        ),
    )
    return Contest("Tuning", contestants, rows)
