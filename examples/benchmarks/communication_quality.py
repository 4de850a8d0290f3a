"""GPT-2 124M on real text by methods that communicate less, and by their exact twins.

Replicas on all devices, 2000 steps of 32 x 512 tokens of the source of Python and its
packages, three seeds; cross-entropy on held-out files.

zjax bench --contest=examples/benchmarks/communication_quality.py
"""

from contestants import JAX_MEMORY
from method_quality import TWINS

from zjax.bench import Case, Contest, Contestant, Row

NAME = "zjax"
MUST = 1.01


def get_contest():
    command = ("{python}", "examples/benchmarks/method_quality.py")
    ours = Contestant(NAME, command, "zjax", JAX_MEMORY, timeout_seconds=3600)
    cases = [
        Case(
            ours=(NAME,),
            peer=1.0,
            metric=method,
            unit="of its loss",
            must=MUST,
            name=method,
            peer_name=twin,
        )
        for method, twin in TWINS.items()
    ]
    row = Row(
        "communication_quality",
        "Methods that communicate less learn as well as their exact twins.",
        tuple(cases),
        headline="Validation loss of methods that communicate less over their twins",
        higher_is_better=False,
        notes="ratios of losses seed by seed, at equal tokens and learning rates",
        by_devices=False,
    )
    return Contest("Quality of less communication", (ours,), (row,))
