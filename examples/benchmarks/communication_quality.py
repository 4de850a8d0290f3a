"""GPT-2 124M on real text by methods that communicate less, and by their exact twins.

Replicas on all devices, 2000 steps of 32 x 512 tokens of the source of Python and its
packages, three seeds; cross-entropy on held-out files. Local steps: two replicas.

python examples/benchmarks/contest.py examples/benchmarks/communication_quality.py
"""

from contestants import JAX_MEMORY
from contests import Case, Contest, Contestant, Row
from method_quality import TWINS

NAME = "zjax"
MUST = 1.01
ROWS = {
    "communication_quality": (
        "Adam with fewer bits learns as well as Adam.",
        ("adam_int8", "onebit_adam", "zero_one_adam"),
    ),
    "lamb_quality": ("1-bit LAMB learns as well as LAMB.", ("onebit_lamb",)),
    "zeropp_quality": ("ZeRO++ learns as well as Adam.", ("zeropp",)),
    "local_steps_quality": (
        "Replicas with local steps learn as well as without.",
        ("diloco", "streaming_diloco", "muloco"),
    ),
}


def get_contest():
    command = ("{python}", "examples/benchmarks/method_quality.py")
    ours = Contestant(NAME, command, "zjax", JAX_MEMORY, timeout_seconds=3600)
    rows = [
        Row(
            id,
            claim,
            tuple(map(_case, methods)),
            higher_is_better=False,
            notes="ratios of losses seed by seed, at equal tokens and learning rates",
            by_devices=False,
        )
        for id, (claim, methods) in ROWS.items()
    ]
    return Contest("Quality of less communication", (ours,), tuple(rows))


def _case(method):
    return Case(
        ours=(NAME,),
        peer=1.0,
        metric=method,
        unit="times the loss",
        must=MUST,
        name=method,
        peer_name=TWINS[method],
    )
