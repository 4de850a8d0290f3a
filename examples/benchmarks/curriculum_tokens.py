"""Curricula on real text: tokens to the final loss of shuffled samples, over theirs.

A GPT of 30M parameters on one device, three seeds, 1,000 steps of 128 x 512 tokens, a
fifth more where the first ones have fewer tokens; cross-entropy of averaged weights on
held-out files, with a learning rate that does not decay.
"""

from contestants import JAX_MEMORY, ONE_DEVICE
from contests import Case, Contest, Contestant, Row

NAME = "zjax"


def get_contest():
    command = ("{python}", "examples/benchmarks/curriculum_quality.py")
    ours = Contestant(NAME, command, "zjax", JAX_MEMORY | ONE_DEVICE, 3600)
    case = Case(
        ours=(NAME,),
        peer=1.0,
        metric="tokens_over_shuffled",
        unit="times the tokens",
        must=0.9,
        aim=0.67,
        name="tokens to the loss, with the best metric",
        peer_name="shuffled samples",
    )
    row = Row(
        "curriculum_tokens",
        "A curriculum needs fewer tokens to the same loss.",
        (case,),
        higher_is_better=False,
        notes="seed by seed, both where they first reach the final loss of shuffled "
        "samples, interpolated between 30 evaluations; rare words with truncated "
        "sequences, which were the best with one seed; all samples are drawn whole "
        "after half of the steps",
        by_devices=False,
    )
    return Contest("Curriculum", (ours,), (row,))
