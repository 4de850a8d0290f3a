"""Texts of a Llama of 7B that repeat, written with drafts of n-grams and without.

Texts that do not repeat must not become slower.
"""

from contestants import on_one_device
from contests import Case, Contest, Row

PROGRAM = "speculation_ours"
OURS = on_one_device(
    "zjax drafts", "zjax", PROGRAM, "--ways=drafts", timeout_seconds=180
)
PLAIN = on_one_device(
    "zjax plain", "peer", PROGRAM, "--ways=plain", timeout_seconds=180
)
BARS = {"1 text": (1.3, 1.8), "8 texts": (1.3, 1.8), "8 drawn texts": (0.95, 1.0)}
"""Least and hoped-for ratio."""


def get_contest():
    return Contest("Speculation", (OURS, PLAIN), (row(),))


def row():
    """Tokens per second with drafts, over those without."""
    return Row(
        "speculation",
        "Texts that repeat are written faster with drafts, and others no slower.",
        tuple(compare(name, *bars) for name, bars in BARS.items()),
        headline="Llama 7B, texts that repeat: with drafts over without",
        notes="blocks of random weights in bfloat16; prompts of 48 random tokens, 4 "
        "times; 256 new tokens; head and token table make greedy texts go round in "
        "circles of 16 tokens, texts drawn at temperature 100 do not repeat; 3 drafts "
        "at most, from the text alone; new "
        "prompts in each round; prompts are in the time",
        by_devices=False,
    )


def compare(name, must, aim):
    """Rates of the same prompts."""
    return Case(
        ours=(OURS.name,),
        peer=(PLAIN.name,),
        metric=f"{name}, drafts tokens/s",
        peer_metric=f"{name}, plain tokens/s",
        unit="tokens/s",
        must=must,
        aim=aim,
        name=name,
        peer_name="without drafts",
    )
