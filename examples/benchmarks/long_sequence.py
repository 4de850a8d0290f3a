"""The longest sequence on which a Llama 8B trains: split over devices, over whole."""

from zjax.bench import Case, Contest, Contestant, Row

UNIT = 8_192
RING, ULYSSES, WHOLE = "zjax ring", "zjax Ulysses", "zjax whole sequences"


def get_contest():
    script = ("{python}", "examples/benchmarks/largest_model.py", f"--unit={UNIT}")
    grow = "--grow=data.length,model.max_length"

    def search(name, *settings):
        config = "configs/llama_8b_long_sequence.py"
        command = (*script, grow, config, "global_batch_size=0", *settings)
        return Contestant(name, command, "zjax", timeout_seconds=3_000)

    def split(name, way):
        sizes = ("mesh.data=1", "mesh.sequence=-1")
        return search(name, *sizes, f"model.sequence_attention={way}")

    case = Case(
        ours=(ULYSSES, RING),
        peer=(WHOLE,),
        metric="length",
        unit="tokens",
        must=3.4,
    )
    row = Row(
        "ulysses_ring",
        "With the sequence split over four GPUs longer sequences train than without.",
        (case,),
        notes="Llama 8B, one sequence per share of the batch, ZeRO-3, blocks "
        f"recomputed; with {UNIT:,} tokens more each ran out of memory",
        by_devices=False,
    )
    contestants = (
        search(WHOLE, "mesh.data=-1", "mesh.sequence=1"),
        split(ULYSSES, "ulysses"),
        split(RING, "ring"),
    )
    return Contest("Longest sequence of Llama 8B", contestants, (row,))
