"""Bytes between replicas of 1-bit Adam, against Adam in bfloat16.

Counted in the programs that XLA compiles for two devices of a CPU; nothing is timed.
"""

from contests import Case, Contest, Contestant, Row

CONFIG = "configs/gpt2_onebit_adam.py"
SMALL = (
    "directory=runs/onebit_volume",
    "checkpoint.resume=auto",
    "num_steps=100",
    "global_batch_size=4",
    "model.num_layers=2",
    "model.embed_size=256",
    "model.num_heads=4",
    "model.vocab_size=8192",
    "model.max_length=64",
    "optimizer.schedule.num_warmup_steps=10",
)
"""Three million numbers: scales and losses, which do not grow, hardly count."""
TWO_CPUS = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
}


def _contestant(name, kind, *settings):
    script = ("{python}", "examples/benchmarks/replica_bytes.py", CONFIG)
    return Contestant(name, (*script, *SMALL, *settings), kind, TWO_CPUS)


OURS = _contestant("1-bit Adam", "zjax")
ADAM = _contestant(
    "Adam in bfloat16",
    "peer",
    "optimizer.rule=adamw",
    "communication.codec=bfloat16",
)


def get_contest():
    sides, unit = ((OURS.name,), (ADAM.name,)), "parameters per byte"
    compared = (
        Case(*sides, "step", unit, must=15.5, aim=16, name="a compressed step"),
        Case(*sides, "run", unit, must=4.8, aim=5, name="a run, 15 % warm-up"),
    )
    row = Row(
        "onebit_volume",
        "1-bit Adam sends 1/16 of the bytes of bfloat16 Adam.",
        compared,
        theme="parallelism",
        notes="bytes that cross replicas, counted in the compiled programs",
        by_devices=False,
    )
    return Contest("Bytes between replicas", (OURS, ADAM), (row,))
