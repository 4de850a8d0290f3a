"""Tables and plots of `zjax plan`: schedules, the pipeline, and collectives."""

import collections
import os
from collections.abc import Mapping

import jax
import numpy as np

from zjax.observe import plot
from zjax.observe.collectives import list_collectives
from zjax.observe.communication import (
    CPU_NOTE,
    LinkBytes,
    describe_communication,
    describe_links,
    link_bytes,
)
from zjax.parallel.pipeline_schedule import IDLE, Kind, Name, Schedule, make_schedule
from zjax.run.step import Step
from zjax.schedule.exchange import make_exchanges
from zjax.schedule.training import TrainingSchedule
from zjax.settings.schema import Config
from zjax.sharding.describe import render_table
from zjax.sharding.mesh import is_simulated
from zjax.typing import Batch

_NUM_ROWS = 11
"""Rows of the table, besides the row of the first step."""
_NUM_POINTS = 500
"""Steps from which a curve of the picture is drawn."""


def describe_schedule(schedule: TrainingSchedule) -> str:
    """Tabulates the schedules of a run at some of the steps.

    A run with several programs gets a column with the program of the step, and a table
    of how often each program starts.
    """
    planned = _planned(schedule, _NUM_ROWS + 1)
    rows = [
        [f"{step:,}", *map(_format, values.values())]
        for step, values in planned.items()
    ]
    names = [name.replace("_", " ") for name in planned[1]]
    right = range(len(names) + 1)
    exchanges = schedule.exchanges
    if not exchanges.steps_apart and len(exchanges.phases) == 1:
        return render_table(("step", *names), rows, right=right)
    times = exchanges.count_programs(schedule.config.num_steps)
    for step, row in zip(planned, rows, strict=True):
        row.append(schedule.at(step).exchange.phase.program)
    counts = [(name, f"{number:,}") for name, number in times.items()]
    tables = (
        render_table(("step", *names, "program"), rows, right=right),
        render_table(("program", "times in the run"), counts, right=(1,)),
    )
    return "\n\n".join(tables)


def plot_schedule(schedule: TrainingSchedule, path: str | os.PathLike[str]) -> None:
    """Plots the schedules of a run against the step."""
    planned = _planned(schedule, _NUM_POINTS)
    figure = plot.make_figure(8, 0.6 + 1.5 * len(planned[1]))
    panels = figure.subplots(len(planned[1]), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, planned[1], strict=True):
        values = [at_step[name] for at_step in planned.values()]
        axes.step([*planned], values, where="post", color=plot.BLUE, linewidth=1.5)
        axes.set_ylabel(name.replace("_", "\n"))
        # A curve of zeros needs some height.
        axes.set_ylim(0, 1.05 * max(values) or 1)
        plot.style_axes(axes)
    panels[-1].set_xlabel("step")
    plot.save_figure(figure, path)


def _planned(
    schedule: TrainingSchedule, num_points: int
) -> dict[int, dict[str, float]]:
    """Returns the planned values of the first, the last, and evenly spaced steps."""
    steps = np.linspace(1, schedule.config.num_steps, num_points).round().astype(int)
    # A short run has fewer steps than points.
    return {step: schedule.planned(step) for step in dict.fromkeys(steps.tolist())}


def _format(value: float) -> str:
    is_whole = value == int(value) and abs(value) >= 1
    return f"{int(value):,}" if is_whole else f"{value:.3g}"


COLORS: dict[Kind, str] = {
    "forward": plot.BLUE,
    "backward": plot.ORANGE,
    "weights": plot.GREEN,
}
SCHEDULES: tuple[Name, ...] = ("gpipe", "1f1b", "interleaved", "zb_h1")
Costs = Mapping[Kind, int | float]


def pass_costs(*, recompute: bool) -> Costs:
    """Relative time of each pass of a stage by matmuls, where a forward pass takes 1.

    Example:
        >>> dict(pass_costs(recompute=True))
        {'forward': 1, 'backward': 2, 'weights': 1}
    """
    # The input gradient and the weight gradient each need as many FLOPs as a forward.
    return {"forward": 1, "backward": 2 if recompute else 1, "weights": 1}


def describe_pipeline(schedule: Schedule, *, recompute: bool) -> str:
    """Compares schedules of equal stages and microbatches: time, idle share, storage.

    Example:
        >>> schedule = make_schedule("1f1b", num_stages=4, num_microbatches=8)
        >>> print(describe_pipeline(schedule, recompute=False).splitlines()[4])
        * 1f1b            33   27.3 %                7   activations of a stage
    """
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    rows = []
    for name in SCHEDULES:
        # Interleaving needs full groups of microbatches, one per stage.
        if name == "interleaved" and num_microbatches % num_stages:
            continue
        num_chunks = max(2, schedule.num_chunks) if name == "interleaved" else 1
        each = make_schedule(
            name,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
        )
        # zb_h1 keeps activations between the two halves of the backward pass.
        recomputes = recompute and name != "zb_h1"
        costs = pass_costs(recompute=recomputes)
        part = "a stage" if num_chunks == 1 else f"1/{num_chunks} of a stage"
        rows.append(
            (
                f"{'*' if name == schedule.name else ' '} {name}",
                f"{each.time(costs):g}",
                f"{each.bubble(costs):.1%}".replace("%", " %"),
                str(each.num_slots),
                f"{'input' if recomputes else 'activations'} of {part}",
            )
        )
    heading = f"{num_stages} stages, {num_microbatches} microbatches; "
    heading += "a forward pass takes 1\n"
    columns = ("schedule", "time", "idle", "stored at most", "each")
    return heading + render_table(columns, rows, right=(1, 2, 3))


def plot_pipeline(
    schedule: Schedule, path: str | os.PathLike[str], *, costs: Costs
) -> None:
    """Plots which microbatch each stage computes over time; `costs` are per stage."""
    figure = plot.make_figure(12, 1.6 + 0.45 * schedule.num_stages)
    axes = figure.subplots()
    time = 0.0
    for phase in schedule.phases:
        for tick in range(phase.start, phase.end):
            for kind in phase.kinds:
                width = _width(schedule, kind, costs)
                _draw_tick(axes, schedule, kind, tick, time, width)
                time += width
    for kind in schedule.passes:
        # Empty bars give the legend one entry per kind.
        axes.barh(0, 0, color=COLORS[kind], label=kind)
    axes.set_yticks(range(schedule.num_stages))
    axes.set_ylabel("stage")
    axes.invert_yaxis()
    axes.set_xlim(0, time)
    axes.set_xlabel("time, in forward passes of a stage")
    idle = schedule.bubble(costs)
    title = f"{schedule.name}: {schedule.num_microbatches} microbatches, "
    axes.set_title(f"{title}{idle:.1%} of the time idle", fontsize=12)
    axes.legend(frameon=False, ncols=3, loc="upper right", bbox_to_anchor=(1, -0.12))
    plot.style_axes(axes)
    axes.grid(visible=False)
    plot.save_figure(figure, path)


def _width(schedule: Schedule, kind: Kind, costs: Costs) -> float:
    """Duration of a pass of a chunk; a backward pass includes weights unless split."""
    includes = kind == "backward" and "weights" not in schedule.passes
    return (costs[kind] + includes * costs["weights"]) / schedule.num_chunks


def _draw_tick(axes, schedule, kind, tick, time, width):
    """Draws the passes of one kind in a tick, darker for earlier chunks."""
    passes = schedule.passes[kind]
    for stage in np.flatnonzero(passes.microbatch[tick] != IDLE):
        chunk = int(passes.chunk[tick, stage])
        shade = 1 - 0.5 * chunk / schedule.num_chunks
        style = {"color": COLORS[kind], "alpha": shade, "edgecolor": "white"}
        axes.barh(stage, width, left=time, height=0.9, **style)
        text = str(passes.microbatch[tick, stage])
        place = {"ha": "center", "va": "center", "color": "white", "fontsize": 8}
        axes.text(time + width / 2, float(stage), text, **place)


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
