"""Reports what a run would take before it runs: the text of `zjax plan`."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zjax.config.check import check_config
from zjax.errors import ConfigError, OutputError, Problem, ZjaxError, find_remedy
from zjax.estimate import mesh as mesh_choice
from zjax.estimate import tables
from zjax.estimate.exchanges import describe_active, describe_exchanges
from zjax.estimate.link_speed import check_link, report_link
from zjax.estimate.models import (
    add_held,
    describe_models,
    weigh_models,
    with_closed_mesh,
)
from zjax.estimate.tables import kept_rows
from zjax.estimate.trial import Machine, Trial, weigh
from zjax.files import local_path
from zjax.models.build import make_model
from zjax.observe import plot
from zjax.offload.compiled import Peak
from zjax.optim.build import make_optimizer
from zjax.run import reports
from zjax.run.batch import abstract_batch, with_batch_sizes
from zjax.run.fit import check_fits, fit_memories, offloaded_inputs
from zjax.run.step import Step, make_step
from zjax.schedule.lengths import end_by_tokens
from zjax.schedule.training import TrainingSchedule
from zjax.settings.batch import resolve_batch
from zjax.settings.mixture import describe_future
from zjax.settings.schema import Config
from zjax.sharding import describe, memory
from zjax.sharding import mesh as meshes
from zjax.sharding import plan as plans
from zjax.sharding.placement import ArrayPlan
from zjax.train.programs import make_pipeline_schedule
from zjax.typing import Model

_NO_MACHINE = "zero.offload=auto is shown as pinned_host: there are no devices to fill"
CPU_MEMORY_NOTE = (
    "\nA program for CPUs keeps the scores of attention and computes bf16 in f32: its\n"
    "temporaries are not those of a program for GPUs."
)
GPU_TITLE = (
    "a step on GPUs by its traced program, attention as a kernel without scores\n"
    "(an upper estimate: two measured peaks were up to 10 % lower)"
)
DEVICES_PER_HOST = 8
"""Devices per host that are assumed if the devices are not on this machine."""
PAPER_DEVICES = (1, 4, 16, 64, 256, 1024)


def report_plan(
    config: Config,
    *,
    num_devices: int = 0,
    picture: str = "",
    collectives: bool = False,
    link: str = "",
    schedule: bool = False,
    device_gb: int | float = 0,
    devices_per_host: int = 0,
) -> str:
    """Plans a run and describes placement, memory by ZeRO stage, and communication.

    `num_devices=0` plans for the devices of this machine, and compiles the step for the
    memory analysis; `collectives` needs that program. `picture` is a PNG of bytes per
    device and stage, by default `plan.png` in the directory of the run; `schedule` adds
    pictures beside it. `link` is the speed of a node's link, for a prediction by
    method. `device_gb` and `devices_per_host` describe the machine for `mesh="auto"`; 0
    asks the devices.
    """
    if collectives:
        _check_collectives(config, num_devices)
    is_here = num_devices == 0
    proposal = _proposal(config, num_devices, device_gb, devices_per_host)
    if proposal:
        config = dataclasses.replace(config, mesh=proposal.mesh)
    num_devices = num_devices or jax.device_count()
    check_config(config, num_devices)
    if config.num_tokens:
        config = end_by_tokens(with_batch_sizes(config, num_devices))
        check_config(config, num_devices)
    if link:
        check_link(config, num_devices, link)
    model = make_model(config)
    tx = make_optimizer(config, model)
    stages = _plan_each_zero_stage(config, model, tx, 0 if is_here else num_devices)
    plan = stages[config.zero.stage]
    closed = with_closed_mesh(config, num_devices)
    models = weigh_models(closed, model, tx) if config.rl else []
    beside = add_held(models[1:])
    if is_here:
        plan = fit_memories(plan, config, model, tx, beside=beside)
    path = local_path("output", picture or os.path.join(config.directory, "plan.png"))
    pictures = [pathlib.Path(path)]
    title = f"{memory.num_params(plan):,} parameters on {num_devices} devices"
    with _drawing(pictures[0]):
        kept = [kept_rows(each, config) for each in stages]
        totals = list(map(memory.plan_bytes, stages, kept))
        plot.plot_memory_per_stage(totals, pictures[0], title=title)
    inputs = offloaded_inputs(model, plan, config, abstract_batch(config, plan))
    parts = _describe_placement(plan, config, inputs, model)
    parts += _describe_each_zero_stage(stages, kept, num_devices, is_here=is_here)
    parts += [describe_models(models)] if models[1:] else []
    if is_here:
        step = make_step(model, tx, plan, config)
        parts += _describe_step(step, config, collectives=collectives)
        parts += _describe_refusal(plan, config, inputs, beside)
    # The formula knows no offload, and GPUs have the analysis of the compiled step.
    if meshes.platform_of(plan.mesh) != "gpu" and not plan.is_offloaded:
        parts.append(describe_on_gpus(weigh(config, closed.mesh, model, tx)))
    if schedule:
        pictures.append(pictures[0].with_name("steps.png"))
        parts.append(_report_steps(config, num_devices, pictures[-1]))
    if schedule and closed.mesh.pipeline > 1:
        pictures.append(pictures[0].with_name("schedule.png"))
        parts.append(report_pipeline(config, plan, pictures[-1]))
    if link:
        parts.append(report_link(config, num_devices, link))
    parts.append(f"picture: {' and '.join(map(str, pictures))}")
    parts += [mesh_choice.describe_proposal(proposal)] if proposal else []
    return "\n\n".join(parts)


def _check_collectives(config: Config, num_devices: int) -> None:
    """Refuses a list of collectives where the step is not one compiled program."""
    if num_devices:
        problem = f"needs a compiled step, and num_devices={num_devices} compiles none"
        remedy = "use --simulated_devices, or the devices themselves"
    elif config.zero.offloads_state:
        problem = "needs a step of one program; with offloaded state it is several"
        remedy = "leave it out, or set zero.offload=None"
    else:
        return
    raise ConfigError(Problem("collectives", True, problem, remedy))


def _report_steps(config: Config, num_devices: int, picture: pathlib.Path) -> str:
    """Describes and plots settings that change from step to step."""
    config = with_batch_sizes(config, num_devices)
    schedule = TrainingSchedule(config, num_devices)
    with _drawing(picture):
        reports.plot_schedule(schedule, picture)
    return reports.describe_schedule(schedule)


def _plan_each_zero_stage(
    config: Config, model: Model, tx: Any, num_devices: int
) -> list[plans.Plan]:
    """Plans for ZeRO stages 0 to 3; `num_devices=0` takes this machine's devices."""
    if num_devices:
        mesh = meshes.abstract_mesh(config.mesh, num_devices)
    else:
        mesh = meshes.make_mesh(config.mesh)
    found = []
    for stage in memory.STAGES:
        zero = dataclasses.replace(config.zero, stage=stage)
        of_stage = dataclasses.replace(config, zero=zero)
        found.append(plans.make_plan(of_stage, mesh, model, tx))
    return found


def _describe_placement(
    plan: plans.Plan, config: Config, inputs: Sequence[ArrayPlan], model: Model
) -> list[str]:
    """Texts on the placement of arrays, memories and exchanges."""
    is_auto = config.zero.optimizer_memory == plans.AUTO
    texts = [
        describe.describe_plan(plan, kept_rows(plan, config)),
        describe.describe_unsharded(plan),
        tables.describe_memories(plan, config, inputs),
        describe_active(config.model),
        describe_exchanges(
            config,
            dict(plan.mesh.shape),
            resolve_batch(config, plan.num_batch_shares),
            model,
        ),
        describe_future(config.model),
        "" if isinstance(plan.mesh, Mesh) or not is_auto else _NO_MACHINE,
    ]
    return [text for text in texts if text]


def _describe_each_zero_stage(
    stages: Sequence[plans.Plan],
    kept: Sequence[Any],
    num_devices: int,
    *,
    is_here: bool,
) -> list[str]:
    """Titled table of bytes per device by ZeRO stage."""
    title = f"bytes per device by ZeRO stage on {num_devices} devices"
    title += "" if is_here else " (estimate: the devices are not here)"
    return [title, tables.describe_stages(stages, kept)]


def _describe_step(step: Step, config: Config, *, collectives: bool) -> list[str]:
    """Texts on peak memory, and collectives if asked for, of the compiled step."""
    platform = meshes.platform_of(step.mesh)
    batch = abstract_batch(config, step.plan)
    parts = [describe_peak(step.predict_peak(batch), platform)]
    if collectives:
        parts.append(reports.describe_collectives(step, config, step.compile(batch)))
        if step.mesh.shape[meshes.REPLICA] > 1:
            parts.append(reports.report_links(step, config, batch))
    return parts


def _describe_refusal(
    plan: plans.Plan,
    config: Config,
    inputs: Sequence[ArrayPlan],
    beside: memory.MemoryBytes,
) -> list[str]:
    """Reason why the plan does not fit this machine, if there is one."""
    assert isinstance(plan.mesh, Mesh)
    try:
        check_fits(plan, config, plan.mesh, inputs, beside)
    except ZjaxError as error:
        return [f"this machine has no room for it: {error}"]
    return []


def _proposal(
    config: Config, num_devices: int, device_gb: int | float, devices_per_host: int
) -> mesh_choice.Proposal | None:
    """Proposes a mesh for the planned machine, if the config leaves mesh axes open."""
    given = {"device_gb": device_gb, "devices_per_host": devices_per_host}
    if not mesh_choice.is_open(config.mesh):
        problem, remedy = "is used only with mesh='auto'", "leave it out"
        unread = [Problem(k, x, problem, remedy) for k, x in given.items() if x]
        if unread:
            raise ConfigError(*unread)
        return None
    if num_devices and not device_gb:
        problem = "is needed by mesh='auto' for devices that are not here"
        remedy = "give their memory, such as --device_gb=80"
        raise ConfigError(Problem("device_gb", device_gb, problem, remedy))
    machine = (
        Machine(num_devices, DEVICES_PER_HOST, 0)
        if num_devices
        else mesh_choice.this_machine(jax.devices())
    )
    return mesh_choice.propose_mesh(
        config,
        Machine(
            machine.num_devices,
            devices_per_host or machine.devices_per_host,
            device_gb * 1e9 or machine.device_bytes,
        ),
    )


@contextlib.contextmanager
def _drawing(path: pathlib.Path) -> Iterator[None]:
    """Turns errors of drawing into an OutputError that names the file."""
    try:
        yield
    except (
        OSError,
        ValueError,
    ) as error:  # Matplotlib raises ValueError for an unknown suffix
        reason = getattr(error, "strerror", None) or error
        named = "name a file that can be made, such as plan.png"
        is_of_system = isinstance(error, OSError)
        remedy = find_remedy(error, elsewhere=named) if is_of_system else named
        problem = f"cannot be drawn ({reason})"
        raise OutputError(Problem("output", str(path), problem, remedy)) from error


def report_pipeline(config: Config, plan: plans.Plan, picture: pathlib.Path) -> str:
    """Draws when the stages of a pipeline are busy, and compares all schedules."""
    batch = resolve_batch(config, plan.num_batch_shares)
    schedule = make_pipeline_schedule(
        config.pipeline, plan.mesh.shape[meshes.PIPELINE], batch.num_microbatches
    )
    recompute = config.pipeline.recomputes
    costs = reports.pass_costs(recompute=recompute)
    with _drawing(picture):
        reports.plot_pipeline(schedule, picture, costs=costs)
    return reports.describe_pipeline(schedule, recompute=recompute)


def describe_peak(peak: Peak | None, platform: str) -> str:
    """Table of bytes on a device at the peak of a step.

    Programs for CPUs get a note on the difference from GPUs.
    """
    if peak is None:
        return "this platform gives no memory analysis of compiled programs"
    cells = [(name, describe.format_bytes(x)) for name, x in peak.parts.items() if x]
    cells.append(("total", describe.format_bytes(peak.total)))
    title = (
        f"most that a step compiled for {platform.upper()}s takes, "
        f"predicted for the program: {peak.moment}\n"
    )
    table = describe.render_table(("", "bytes/device"), cells, right=(1,))
    return title + table + (CPU_MEMORY_NOTE if platform == "cpu" else "")


def describe_on_gpus(trial: Trial) -> str:
    """Table of estimated bytes per GPU of a step."""
    parts = {
        "state and gradients": trial.state,
        "activations": trial.activations,
        "total": trial.total,
    }
    cells = [(name, describe.format_bytes(x)) for name, x in parts.items()]
    table = describe.render_table(("", "bytes/device"), cells, right=(1,))
    return f"{GPU_TITLE}\n{table}"
