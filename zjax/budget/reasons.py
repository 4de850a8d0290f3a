"""Why a mesh was proposed, in sentences and in a table."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Sequence

from zjax.budget.trial import Machine, Trial
from zjax.config import axes, schema
from zjax.errors import Problem
from zjax.sharding import mesh as meshes
from zjax.sharding.describe import WIDTH, format_bytes, render_table
from zjax.sharding.zero import splits_of

TOO_FEW_MICROBATCHES = "exceeds num_microbatches"
"""Obstacle of a mesh with more stages than microbatches."""
_WHY = {
    meshes.TENSOR: "matrices split within a host",
    meshes.SEQUENCE: "the activations of one sequence do not fit",
    meshes.PIPELINE: "splits of tensors and sequences alone do not fit",
}


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A proposed mesh with its reasons.

    Args:
        mesh: The mesh; all sizes are 1 or more.
        reasons: Sentences for a reader.
        trials: Meshes that were tried, in order; the last one is proposed.
        machine: The machine it is for.
    """

    mesh: schema.Mesh
    reasons: tuple[str, ...]
    trials: tuple[Trial, ...]
    machine: Machine


def describe_proposal(proposal: Proposal) -> str:
    """The meshes that were tried, the reasons and the flags, in 100 columns."""
    shown = [
        axis
        for axis in axes.AXES
        if any(getattr(trial.mesh, axis) > 1 for trial in proposal.trials)
    ] or [meshes.DATA]
    rows = []
    for trial in proposal.trials:
        sizes = [str(getattr(trial.mesh, axis)) for axis in shown]
        parts = (trial.state, trial.activations, trial.total)
        numbers = [""] * 3 if trial.obstacle else map(format_bytes, parts)
        fits = "taken" if trial.fits(proposal.machine) else "does not fit"
        rows.append((*sizes, *numbers, trial.obstacle or fits))
    columns = (*shown, "state", "activations", "total", "")
    table = render_table(columns, rows, right=range(len(shown) + 3))
    lines = [*proposal.reasons, explicit_setting(proposal.mesh)]
    return "\n".join([table, "", *(textwrap.fill(line, WIDTH) for line in lines)])


def explicit_setting(mesh: schema.Mesh) -> str:
    """Flags that set the axes of a mesh that have several devices.

    Example:
        >>> explicit_setting(schema.Mesh(data=4, tensor=2))
        '--config.mesh.data=4 --config.mesh.tensor=2'
    """
    sizes = {axis: getattr(mesh, axis) for axis in axes.AXES}
    given = {k: n for k, n in sizes.items() if n > 1} or {meshes.DATA: 1}
    return " ".join(f"--config.mesh.{axis}={size}" for axis, size in given.items())


def reasons(
    config: schema.Config, trials: Sequence[Trial], machine: Machine
) -> Iterator[str]:
    """Sentences that say why the last mesh of `trials` is proposed.

    Args:
        config: Settings of the run.
        trials: Meshes that were tried, in order; the last one is proposed.
        machine: The machine it is for.

    Yields:
        Sentences.
    """
    mesh = trials[-1].mesh
    if math.isinf(machine.device_bytes):
        yield "The memory of these devices is not known: every mesh is assumed to fit."
    else:
        size, usable = map(format_bytes, (machine.device_bytes, machine.usable_bytes))
        yield f"A step may take {usable} of the {size} of a device."
    for axis, why in _WHY.items():
        size = getattr(mesh, axis)
        if size > 1 and not getattr(config.mesh, axis):
            yield f"{axis}={size}: {why}; {_with_less(axis, trials)}."
    if config.model.moe.num_experts and mesh.expert == 1:
        yield (
            "expert=1: auto does not split experts, whose best size depends on the "
            "links between devices; set mesh.expert, and compare."
        )
    if mesh.data > 1:
        stage = config.zero.stage
        yield f"data={mesh.data}: the remaining devices; ZeRO {stage} shards over them."
    if mesh.pipeline > 1 and splits_of(config.zero.stage).grad_sum:
        yield (
            f"zero.stage={config.zero.stage} communicates in each tick of a pipeline; "
            "zero.stage=1 once per step, where it fits."
        )


def no_room(
    config: schema.Config, trials: Sequence[Trial], machine: Machine
) -> Problem:
    """The problem that a step fits on no mesh, with settings that need less.

    Args:
        config: Settings of the run.
        trials: All meshes that were tried.
        machine: The machine.

    Returns:
        The problem, with the bytes of the mesh that takes least.
    """
    best = min((x for x in trials if not x.obstacle), key=lambda x: x.total)
    parts = (
        f"state {best.state / 1e9:.1f} GB, activations {best.activations / 1e9:.1f} GB"
    )
    state_fits = best.state <= machine.usable_bytes
    offers = {
        "a higher zero.stage": not splits_of(config.zero.stage).compute,
        "zero.optimizer_memory='pinned_host'": not config.zero.offloads_state,
        "model.remat='full'": state_fits and config.model.remat != "full",
        "a smaller microbatch_size": state_fits and best.of_one < best.activations,
        "more microbatches": any(
            TOO_FEW_MICROBATCHES in trial.obstacle for trial in trials
        ),
        "more devices": True,
    }
    helps = ", ".join(offer for offer, does_help in offers.items() if does_help)
    return Problem(
        "mesh",
        axes.AUTO,
        f"finds no room on {machine.num_devices} x {machine.device_bytes / 1e9:.1f} "
        f"GB: a step takes {best.total / 1e9:.1f} GB "
        f"({parts}) with {explicit_setting(best.mesh)}",
        f"use {helps} or a smaller model",
    )


def _with_less(axis: str, trials: Sequence[Trial]) -> str:
    *before, taken = trials
    less = [x for x in before if getattr(x.mesh, axis) < getattr(taken.mesh, axis)]
    weighed = [x for x in less if not x.obstacle]
    if not weighed:
        return less[-1].obstacle
    closest = min(weighed, key=lambda x: x.total)
    return f"smaller sizes take at least {format_bytes(closest.total)}"
