"""1F1B on all devices, over the time that its schedule allows.

python examples/benchmarks/contest.py examples/benchmarks/pipeline_bubble.py
    [--only="8 microbatches"]
"""

from contestants import JAX_MEMORY, zjax
from contests import Case, Contest, Contestant, Row

CONFIG = "configs/gpt_6p7b.py"
MODEL = (
    "model.num_layers=16",
    "zero.stage=1",
    "microbatch_size=1",
    "global_batch_size=0",
)
"""Half the depth, whose state two devices of 80 GB hold."""
BY_BLOCK = ("model.remat=full",)
IN_STAGES = ("mesh.pipeline=-1", "mesh.data=1", "pipeline.recompute=False")
"""As many stages as there are devices."""
COUNTS = (8, 16)


def get_contest():
    contestants, cases = [], []
    for count in COUNTS:
        name, alone = f"{count} microbatches", f"a stage alone for {count}"
        given = (*MODEL, *BY_BLOCK, f"num_microbatches={count}")
        script = ("{python}", "examples/benchmarks/stage_alone.py")
        words = (*script, "--stages={devices}", CONFIG, *given)
        contestants += [
            zjax(name, CONFIG, *given, *IN_STAGES),
            Contestant(alone, words, "zjax", JAX_MEMORY),
        ]
        sides = ((name,), (alone,))
        metric = ("step_seconds", "seconds")
        cases.append(Case(*sides, *metric, must=1.1, aim=1.04, name=name))
    row = Row(
        "pipeline_bubble",
        "1F1B takes no longer than its schedule allows.",
        tuple(cases),
        theme="parallelism",
        headline="Pipeline 1F1B: time over its schedule",
        higher_is_better=False,
        notes="the peer is one of the P stages on a device by itself, with its share "
        "of the layers and of the vocabulary; it takes P - 1 microbatches more, which "
        "is (M + P - 1) / M of the time for M; both compute each block again",
    )
    title = "16 layers of GPT 6.7B in a pipeline, 1 x 4096 tokens per microbatch"
    return Contest(title, tuple(contestants), (row,))
