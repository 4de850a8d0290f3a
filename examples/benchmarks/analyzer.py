"""The offline analyzer with two processes over one: samples per second.

Vocabulary rarity and compression ratio of Python source of this machine, cut into
samples of 32 bytes; the start of the processes and the sort count.

python examples/benchmarks/contest.py examples/benchmarks/analyzer.py
"""

from contests import Case, Contest, Contestant, Row

NAME = "zjax"


def get_contest():
    command = ("{python}", "examples/benchmarks/analyze_speed.py")
    ours = Contestant(NAME, command, "zjax", {"JAX_PLATFORMS": "cpu"}, 900)
    case = Case(
        ours=(NAME,),
        peer=1.0,
        metric="two_over_one",
        unit="times the samples/s",
        must=1.6,
        aim=1.9,
        name="samples/s of two processes",
        peer_name="one process",
    )
    row = Row(
        "analyzer",
        "Two processes measure samples almost twice as fast.",
        (case,),
        notes="whole runs in turn, with the start of processes, on idle cores",
        by_devices=False,
    )
    return Contest("Analyzer", (ours,), (row,))
