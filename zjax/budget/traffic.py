"""What rests outside of the devices, and what a step moves up to them and down."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from zjax.config.batch import resolve_batch
from zjax.config.schema import Config
from zjax.sharding import memory
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, HOST, NVME, Plan


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Arrays of one kind in one memory, in bytes for one device.

    Args:
        what: The arrays.
        memory: `pinned_host` or `nvme`.
        resting: Of the arrays.
        up: That a step brings to the device.
        down: That it sends back.
    """

    what: str
    memory: str
    resting: int
    up: int
    down: int


def traffic_of_step(
    plan: Plan, config: Config, inputs: Sequence[ArrayPlan] = ()
) -> list[Traffic]:
    """Everything that rests outside of the devices, and how often a step moves it.

    Args:
        plan: Placement of every array.
        config: Read for the batch, clipping and the memories of `zero`.
        inputs: Of blocks, as `zjax.offload.inputs.waiting_inputs` tells them.

    Returns:
        One for each kind of arrays and memory. Gradients that wait for a norm move at
        most as often as said: those for which there is room stay on the device.
    """
    found = [*_at_rest(plan, config), _gradients(plan, config)]
    for where in (HOST, NVME):
        waiting = memory.bytes_in(where, inputs)
        moved = waiting * _num_microbatches(plan, config)
        found.append(Traffic("inputs of blocks", where, waiting, moved, moved))
    return [x for x in found if x.resting]


def updates_wait(config: Config) -> bool:
    """Whether an update reads a number of all gradients, such as their norm.

    Args:
        config: Settings of a built-in optimizer.

    Returns:
        False where updates run under the backward pass.
    """
    clips = math.isfinite(config.optimizer.clip_norm)
    return clips or config.precision.on_nonfinite != "update"


def _at_rest(plan: Plan, config: Config) -> Iterator[Traffic]:
    passes = 2 * _num_microbatches(plan, config)
    is_late = updates_wait(config) and config.zero.delay_updates_from < 0
    for where in (HOST, NVME):
        state = memory.bytes_in(where, (plan.master, plan.opt_state))
        yield Traffic("state", where, state, state, state)
        params = memory.bytes_in(where, plan.compute)
        # Halves of master weights that wait come up once more, for their update.
        times = passes + (is_late and plan.splits_master)
        yield Traffic("parameters in use", where, params, times * params, params)


def _gradients(plan: Plan, config: Config) -> Traffic:
    number, where = _num_microbatches(plan, config), config.zero.gradient_memory
    rows = memory.waiting_at_rest(plan, config, number)
    waiting = memory.tree_bytes([row for row in rows if row.memory != DEVICE])
    times = number - 1 + updates_wait(config)
    return Traffic("gradients", where, waiting, times * waiting, times * waiting)


def _num_microbatches(plan: Plan, config: Config) -> int:
    return resolve_batch(config, plan.num_batch_shares).num_microbatches
