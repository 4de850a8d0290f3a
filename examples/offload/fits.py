"""What fits on your GPU: the largest GPT for each card and each place of its state.

A step of every shape is planned and its programs are compiled, on the devices here but
without running: a laptop answers for a cluster.

python examples/offload/fits.py

ZJAX_EXAMPLE_SHAPES=3 takes the first three shapes alone.
"""

import dataclasses
import os

import jax
from rich.console import Console
from rich.table import Table

import zjax
from zjax.estimate.tables import num_microbatches
from zjax.run.batch import abstract_batch
from zjax.settings.schema import Config
from zjax.sharding import memory
from zjax.storage.transfers import in_flight_bytes

CARDS = (16, 24, 40, 80, 141)
"""Gigabytes."""
WIDTH = 100
USABLE = 0.92
"""Of a card, after the driver and the libraries."""
SHAPES = {
    "1.3B": (24, 2048, 16),
    "2.7B": (32, 2560, 32),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "30B": (48, 7168, 56),
    "66B": (64, 9216, 72),
    "175B": (96, 12288, 96),
}
"""Layers, width and heads of the models of OPT, by their size."""
PLACES = {
    "all on the GPU": {},
    "optimizer on the host": {"kind": "pinned_host"},
    "blocks and gradients too": {
        "kind": "pinned_host",
        "parameter_memory": "pinned_host",
        "gradient_memory": "pinned_host",
    },
    "optimizer on disks": {
        "kind": "nvme",
        "parameter_memory": "pinned_host",
        "gradient_memory": "pinned_host",
        "nvme_paths": ("/tmp",),
    },
}


@dataclasses.dataclass(frozen=True)
class Needs:
    """What one model takes: `device` without what is on its way, in bytes."""

    name: str
    device: int
    passing: int
    host: int
    disk: int

    def fits(self, card: int) -> bool:
        room = USABLE * card * 1e9
        return self.device + min(self.passing, in_flight_bytes(room)) <= room


def needs(name: str, place: str, length: int) -> Needs:
    """Plans and compiles one step of one sequence."""
    config = make_config(*SHAPES[name], length, PLACES[place])
    mesh = zjax.make_mesh(config.mesh, jax.devices()[:1])
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    plan = zjax.make_plan(config, mesh, model, tx)
    if not plan.is_offloaded:
        total = int(memory.plan_bytes(plan).total)
        return Needs(name, total, passing=0, host=0, disk=0)
    step = zjax.make_step(model, tx, plan, config)
    peak = step.predict_peak(abstract_batch(config, plan))
    passing = peak.parts["groups in transfer"]
    _, host, disks = memory.stored_bytes(plan)
    number = num_microbatches(plan, config)
    gradients = memory.stored_gradients(plan, config.zero, number)
    host += memory.bytes_by_memory(gradients).host
    return Needs(name, peak.total - passing, passing, host, disks)


def make_config(
    layers: int, width: int, heads: int, length: int, offload: dict
) -> Config:
    return zjax.load_config(
        {
            "microbatch_size": 1,
            "global_batch_size": 0,
            "zero": {"stage": 1, "offload": offload or None},
            "data": {"source": "synthetic"},
            "model": {
                "num_layers": layers,
                "embed_size": width,
                "num_heads": heads,
                "vocab_size": 50304,
                "max_length": length,
                "remat": "full",
                "layers_per_scan": 0 if offload else 1,
            },
        }
    )


def cell(found: list[Needs], card: int) -> str:
    """The largest that fits, and the gigabytes it takes of the host and of disks."""
    fitting = [each for each in found if each.fits(card)]
    if not fitting:
        return "-"
    best = fitting[-1]
    sizes = [f"{size / 1e9:,.0f}" for size in (best.host, best.disk) if size]
    return f"{best.name}: {' + '.join(sizes)} GB" if sizes else best.name


def main() -> None:
    length = int(os.environ.get("ZJAX_EXAMPLE_LENGTH", 1024))
    names = list(SHAPES)[: int(os.environ.get("ZJAX_EXAMPLE_SHAPES", len(SHAPES)))]
    table = Table(
        title=f"largest GPT, 1 x {length} tokens per step: what it takes of the host"
        " (+ disks)",
        title_style="",
    )
    table.add_column("card")
    found = {}
    for place in PLACES:
        table.add_column(place)
        found[place] = [needs(name, place, length) for name in names]
    for card in CARDS:
        table.add_row(f"{card} GB", *(cell(found[place], card) for place in PLACES))
    Console(width=WIDTH).print(table)


if __name__ == "__main__":
    main()
