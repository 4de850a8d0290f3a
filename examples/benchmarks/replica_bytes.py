r"""Bytes to other replicas, counted in the compiled programs of a run.

python examples/benchmarks/replica_bytes.py configs/gpt2_onebit_adam.py \
    mesh.replica=2 model.num_layers=2

Prints parameters per byte, of the last phase and of the whole run.
"""

import argparse

import call_timing
import jax

import zjax
from zjax import config as zconfig
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.schedule.exchange import make_exchanges
from zjax.settings import schema

WIDTHS = {"u8": 1, "s8": 1, "u16": 2, "bf16": 2, "u32": 4, "f32": 4, "s32": 4}


def sent_bytes(compiled, mesh):
    """Bytes that cross `replica`; those of an all-reduce count twice."""
    return sum(
        (2 if each.op == "all-reduce" else 1)
        * each.elements
        * each.times
        * WIDTHS.get(each.dtype, 4)
        for each in list_collectives(compiled.as_text())
        if "replica" in mesh_axes(each.groups, mesh)
    )


def count(config: schema.Config) -> dict[str, float]:
    """Parameters per byte of a compressed step, and of a run of all its steps."""
    trainer = zjax.Trainer(config)
    run, batch = trainer.run, next(iter(trainer.loader))
    exchanges = make_exchanges(config)
    sizes = {
        phase.program: sent_bytes(run.step.compile(batch, phase.program), run.mesh)
        for phase in exchanges.sending
    }
    programs = [
        exchanges.at(step + 1).phase.program for step in range(config.num_steps)
    ]
    mean = sum(sizes[program] for program in programs) / config.num_steps
    number = sum(x.size for x in jax.tree.leaves(run.state.master))
    last = sizes[programs[-1]]
    return {"step": number / last, "run": number / mean}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    metrics = count(zconfig.load_config(given.config, *given.settings))
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
