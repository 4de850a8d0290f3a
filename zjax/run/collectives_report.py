"""Reports what the compiled programs of a run send: `zjax plan --collectives`."""

import collections

import jax

from zjax.observe.collectives import list_collectives
from zjax.observe.communication import (
    CPU_NOTE,
    LinkBytes,
    describe_communication,
    describe_links,
    link_bytes,
)
from zjax.run.step import Step
from zjax.schedule.exchange import make_exchanges
from zjax.settings.schema import Config
from zjax.sharding.mesh import is_simulated
from zjax.typing import Batch

NAMES = {"train": "train step", "end_of_round": "end of a round"}
LOCAL = {"train": "local step"}
EXCHANGE = "exchange"
_SILENT = ("outer_gradients_", "merge_", "without_errors")
"""Prefixes of the names of programs that send nothing to other replicas."""


def describe_collectives(
    step: Step, config: Config, compiled: jax.stages.Compiled
) -> str:
    """Compares the collectives of a compiled step with the formulas of the ZeRO stage.

    Programs for CPUs get a note on what other devices do differently.
    """
    program = compiled.as_text()
    if program is None:
        return "this platform gives no text of compiled programs"
    found, exchanges = list_collectives(program), make_exchanges(config)
    text = describe_communication(
        found,
        step.plan,
        step.num_microbatches,
        sends_messages=bool(exchanges.sending or exchanges.steps_apart),
    )
    return f"{text}\n{CPU_NOTE}" if is_simulated(step.mesh) else text


def report_links(step: Step, config: Config, batch: Batch) -> str:
    """Compiles every program of a run that communicates, and reports bytes by link.

    Programs of the fragments of local steps share a row, which shows the mean.
    """
    exchanges = make_exchanges(config)
    counts = exchanges.count_programs(config.num_steps)
    times = {
        name: number for name, number in counts.items() if not name.startswith(_SILENT)
    }
    sent: dict[str, list[tuple[int, LinkBytes]]] = collections.defaultdict(list)
    for program, number in times.items():
        text = step.compile(batch, program).as_text()
        assert text is not None
        found = link_bytes(list_collectives(text), step.mesh)
        sent[_label(program, is_local=exchanges.steps_apart)].append((number, found))
    totals = {name: sum(n for n, _ in parts) for name, parts in sent.items()}
    means = {
        name: LinkBytes(
            *(sum(n * x[i] for n, x in parts) / totals[name] for i in range(2))
        )
        for name, parts in sent.items()
    }
    return describe_links(means, totals, config.num_steps)


def _label(program: str, *, is_local: bool) -> str:
    """Name of a program in the table of a run, with or without local steps."""
    if program.startswith("mean_"):
        return EXCHANGE
    names = NAMES | (LOCAL if is_local else {})
    return names.get(program, program.replace("_", " "))
