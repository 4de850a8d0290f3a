"""The longest sequence on which a Llama 8B trains: split over devices, over whole.

Of a device, programs may take what one of 80 GB has: longer sequences take minutes a
step, and show no more. `--pool_gigabytes` of `largest_model.py` says how much.

python examples/benchmarks/contest.py examples/benchmarks/long_sequence.py
    [--only="zjax Ulysses"]
"""

from contests import Case, Contest, Contestant, Row

UNIT = 4_096
POOL_GIGABYTES = 80
RING, ULYSSES, WHOLE = "zjax ring", "zjax Ulysses", "zjax whole sequences"


def get_contest():
    script = ("{python}", "examples/benchmarks/largest_model.py", f"--unit={UNIT}")
    limits = (f"--pool_gigabytes={POOL_GIGABYTES}", "--brief")
    grow = "--grow=data.length,model.max_length"

    def search(name, *settings):
        config = "configs/llama_8b_long_sequence.py"
        command = (*script, *limits, grow, config, "global_batch_size=0", *settings)
        return Contestant(name, command, "zjax", timeout_seconds=3_000)

    def split(name, way):
        sizes = ("mesh.data=1", "mesh.sequence=-1")
        return search(name, *sizes, f"model.sequence_attention={way}")

    sides = {"ours": (ULYSSES, RING), "peer": (WHOLE,), "unit": "tokens"}
    cases = (
        Case(**sides, metric="length", name="length"),
        Case(
            **sides,
            metric="length",
            peer_metric="size_times_devices",
            peer_name=f"{WHOLE}, times the devices",
            must=0.875,
            aim=1.0,
            name="length per device",
        ),
    )
    row = Row(
        "ulysses_ring",
        "A sequence split over all devices may be nearly as many times as long.",
        cases,
        theme="parallelism",
        headline="Longest sequence: split over all devices, over whole",
        notes="Llama 8B, one sequence per share of the batch, ZeRO-3, blocks "
        f"recomputed, {POOL_GIGABYTES} GB of each device; 0.875 is 3.5 times the "
        f"length on four devices; with {UNIT:,} tokens more each ran out of memory",
    )
    contestants = (
        search(WHOLE, "mesh.data=-1", "mesh.sequence=1"),
        split(ULYSSES, "ulysses"),
        split(RING, "ring"),
    )
    return Contest("Longest sequence of Llama 8B", contestants, (row,))
