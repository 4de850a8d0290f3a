"""A small GPT on real text over links of 110 Mbit/s, in network namespaces on CPUs.

python examples/benchmarks/contest.py examples/benchmarks/slow_network.py
    --rows=zeropp_slow_link
"""

from contests import Case, Contest, Contestant, Row

FOUR = ("--processes=4", "--directory=runs/slow_network/four")
"""Four nodes of one process."""
TWO_NODES = (
    "--processes=4",
    "--nodes=2",
    "--reference=zero3",
    "--directory=runs/slow_network/two_nodes",
)
"""Two nodes of two processes, of which only the nodes have a slow link."""
ADAM = ("adam_float32", "adam_bfloat16")
ONE_BIT, ZERO_ONE, DILOCO = "onebit_adam", "zero_one_adam", "diloco"
ZERO3, ZERO_PP = "zero3", "zeropp"
PEERS = ("torch_float32", "torch_bfloat16", "torch_powersgd")
TIMEOUT_SECONDS = 1_800


def get_contest():
    names = (*ADAM, ONE_BIT, ZERO_ONE, DILOCO, *PEERS)
    contestants = (
        *(_contestant(name, FOUR) for name in names),
        *(_contestant(name, TWO_NODES) for name in (ZERO3, ZERO_PP)),
    )
    return Contest("GPT over a slow network", contestants, (*_rates(), *_times()))


def _rates():
    """Rows about steps per second."""
    yield _row(
        "onebit_slow_link",
        "1-bit Adam is faster than Adam where the link is slow.",
        (_case(ONE_BIT, ADAM, "steps_per_second", "steps/s", 3.5, 6),),
        "4 processes; median of five parts of the run, most of which are compressed",
        headline="Slow link: 1-bit Adam over Adam",
    )
    yield _row(
        "zero_one_slow_link",
        "0/1 Adam is faster than Adam where the link is slow.",
        (_case(ZERO_ONE, ADAM, "mean_steps_per_second", "steps/s", 5, 8),),
        "4 processes; all steps of the schedule",
    )
    yield _row(
        "zeropp_slow_link",
        "ZeRO++ is faster than ZeRO-3 where links are slow.",
        (_case(ZERO_PP, (ZERO3,), "steps_per_second", "steps/s", 2.0, 3.5),),
        "2 nodes of 2 processes",
    )


def _times():
    """Rows about the time to the final loss of Adam in float32."""
    bars = {ONE_BIT: (2.5, 3.5), ZERO_ONE: (3, 5), DILOCO: (4, 15)}
    cases = [
        _case(name, ADAM, "runs_per_hour", "runs/hour", must, aim, name=name)
        for name, (must, aim) in bars.items()
    ]
    yield _row(
        "time_to_loss_slow_link",
        "Methods that send less reach Adam's final loss sooner.",
        tuple(cases),
        "4 processes; held-out loss within 0.5 % of that of Adam in float32",
        headline="Slow link: time to Adam's final loss",
    )
    yield _row(
        "onebit_vs_deepspeed",
        "1-bit Adam: a loss sooner than torch's compressed gradients.",
        (_case(ONE_BIT, PEERS, "runs_per_hour", "runs/hour", 1.0, 1.3),),
        "4 processes; the 1-bit Adam of DeepSpeed 0.19.6, its last, does not run on "
        "CPUs: two of its back ends need CuPy, and the third an operator that only "
        "Intel GPUs have",
    )


def _case(ours, peers, metric, unit, must, aim, name=""):
    return Case((ours,), peers, metric, unit, must=must, aim=aim, name=name)


def _row(id, claim, cases, notes, headline=""):
    return Row(id, claim, cases, headline=headline, notes=notes, by_devices=False)


def _contestant(name, where):
    script = ("{python}", "examples/slow_network/train.py", "--megabits=110")
    command = (*script, f"--methods={name}", *where)
    kind = "peer" if name in PEERS else "zjax"
    return Contestant(name, command, kind, timeout_seconds=TIMEOUT_SECONDS)
