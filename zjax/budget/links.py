"""Bytes by link of every program of a run, counted in what is compiled."""

import collections

from zjax.config.schema import Config
from zjax.observe.collectives import list_collectives
from zjax.observe.links import LinkBytes, describe_links, link_bytes
from zjax.optim.programs import count_programs
from zjax.optim.rounds import make_rounds
from zjax.step import Step
from zjax.typing import Batch

NAMES = {"train": "train step", "end_of_round": "end of a round"}
LOCAL = {"train": "local step"}
EXCHANGE = "exchange"
_SILENT = ("outer_gradients_", "merge_", "without_errors")
"""Beginnings of the names of programs that send nothing to other replicas."""


def report_links(step: Step, config: Config, batch: Batch) -> str:
    """Compiles every program of a run that sends, and tells what crosses which links.

    Args:
        step: The step of the run.
        config: Checked settings.
        batch: ShapeDtypeStructs of the global batch.

    Returns:
        A table; fragments of local steps share a line, which shows their mean.
    """
    times = {
        name: number
        for name, number in count_programs(config).items()
        if not name.startswith(_SILENT)
    }
    sent: dict[str, list[tuple[int, LinkBytes]]] = collections.defaultdict(list)
    for program, number in times.items():
        text = step.compile(batch, program).as_text()
        assert text is not None
        found = link_bytes(list_collectives(text), step.mesh)
        sent[_label(program, config)].append((number, found))
    totals = {name: sum(n for n, _ in parts) for name, parts in sent.items()}
    means = {
        name: LinkBytes(
            *(sum(n * x[i] for n, x in parts) / totals[name] for i in range(2))
        )
        for name, parts in sent.items()
    }
    return describe_links(means, totals, config.num_steps)


def _label(program: str, config: Config) -> str:
    if program.startswith("mean_"):
        return EXCHANGE
    names = NAMES | (LOCAL if make_rounds(config) is not None else {})
    return names.get(program, program.replace("_", " "))
