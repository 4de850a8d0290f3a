"""Communication methods for slow links, and bytes that a node sends per step."""

import dataclasses
import math
from typing import Any

import jax

from zjax.ops.codecs import packed_bytes
from zjax.ops.packed import CODECS
from zjax.replicas.exchange import Exchange, exchanges_by_program
from zjax.schedule.exchange import TRAIN, Exchanges, Phase, make_exchanges
from zjax.settings import choices, schema
from zjax.settings.batch import resolve_batch
from zjax.sharding.mesh import REPLICA
from zjax.sharding.placement import ArrayPlan, dtype_bytes
from zjax.sharding.plan import Plan
from zjax.sharding.roles import trained

ROUND = 40
"""Longest DiLoCo round, in steps, unless the run sets a length."""
FRAGMENTS, DELAY = 4, 5
"""Number of fragments, and steps of delay, of Streaming DiLoCo."""


def methods_of(config: schema.Config) -> dict[str, schema.Config]:
    """Settings of a run by each method, by name; a run may refuse some methods.

    Settings that reduce communication are reset, except for
    `num_steps` and `num_synchronous_steps` of `communication.local_steps`, and the
    options of a compressed optimizer in use.

    Example:
        >>> methods = methods_of(schema.Config())
        >>> methods["DiLoCo"].communication.local_steps.num_steps
        40
    """
    plain, change = _plain(config), dataclasses.replace
    given = config.communication.local_steps
    diloco = schema.LocalSteps(
        num_steps=given.num_steps if given else _round(config.num_steps),
        num_synchronous_steps=given.num_synchronous_steps if given else 0,
    )
    streaming = change(
        diloco,
        num_fragments=FRAGMENTS,
        # A fragment must be merged before the next is sent.
        delay=max(0, min(DELAY, diloco.num_steps // FRAGMENTS - 1)),
    )
    zero3 = change(plain.zero, stage=3, replicas=schema.Sharded())
    messages = {field.name: True for field in dataclasses.fields(schema.Sharded)}
    zeropp = change(zero3, replicas=schema.Sharded(**messages))

    def compressed(kind: type[schema.Compressed]) -> schema.Config:
        rule = choices.as_kind(config.optimizer.rule, kind)
        return change(plain, optimizer=change(plain.optimizer, rule=rule))

    def coded(
        codec: Any, local_steps: schema.LocalSteps | None = None
    ) -> schema.Config:
        sent = schema.Communication(codec=codec, local_steps=local_steps)
        return change(plain, communication=sent)

    return {
        f"{plain.optimizer.rule.kind}, float32": plain,
        baseline_of(config): coded("bfloat16"),
        f"{plain.optimizer.rule.kind}, int8": coded("int8"),
        "1-bit Adam": compressed(schema.OnebitAdam),
        "0/1 Adam": compressed(schema.ZeroOneAdam),
        "1-bit LAMB": compressed(schema.OnebitLamb),
        "DiLoCo": coded("none", diloco),
        "Streaming DiLoCo": coded("int4", streaming),
        "ZeRO-3": change(plain, zero=zero3),
        "ZeRO++": change(plain, zero=zeropp),
    }


def baseline_of(config: schema.Config) -> str:
    """Name of the method that every method is compared with.

    Example:
        >>> baseline_of(schema.Config())
        'adamw, bfloat16'
    """
    return f"{_plain(config).optimizer.rule.kind}, bfloat16"


def _plain(config: schema.Config) -> schema.Config:
    """Settings of a run without methods that reduce communication."""
    rule = config.optimizer.rule
    if isinstance(rule, schema.Compressed):
        rule = choices.as_kind(rule, schema.Adamw)
    return dataclasses.replace(
        config,
        communication=schema.Communication(),
        optimizer=dataclasses.replace(config.optimizer, rule=rule),
        zero=dataclasses.replace(
            config.zero,
            stage=min(config.zero.stage, 1),
            replicas=None,
        ),
    )


def _round(num_steps: int) -> int:
    """Longest round of at most `ROUND` steps that divides a run."""
    steps = range(1, min(ROUND, num_steps) + 1)
    return max(n for n in steps if num_steps % n == 0)


def sent_per_step(plan: Plan, config: schema.Config) -> float:
    """Bytes that one node sends to other nodes per step, averaged over the run.

    Args:
        plan: Plan of a run with several replicas; each replica is a node.
        config: Checked settings of the run.
    """
    if config.zero.replicas:
        return _sent_by_shards(plan, config)
    exchanges = make_exchanges(config)
    if exchanges == Exchanges():
        # What the compiler reduces is counted as float32.
        exchanges = Exchanges(phases=(Phase(TRAIN, "gradients", "float32"),))
    by_program = exchanges_by_program(plan, exchanges)
    sent = (
        number * _sent_by(by_program[program])
        for program, number in exchanges.count_programs(config.num_steps).items()
        if program in by_program
    )
    return sum(sent) / config.num_steps


def _sent_by(exchange: Exchange) -> float:
    """Bytes that all devices of a replica send in an exchange.

    Each device sends a chunk to every other replica, then the mean of the device's
    chunk.
    """
    number = exchange.num_replicas
    devices = exchange.mesh.size // number
    packed = packed_bytes(exchange.codec, exchange.num_elements)
    # Reduce-scatter and all-gather: (N - 1) / N of the packed bytes each.
    return devices * packed * 2 * (number - 1) / number


def _sent_by_shards(plan: Plan, config: schema.Config) -> float:
    """Bytes of ZeRO-3 over nodes: parameters of both passes, and reduced gradients.

    A ring around all devices leaves each node once. Quantized arrays, and parameters
    that a node gathers once, go from each device to the counterparts on other nodes.
    """
    passes = resolve_batch(config, plan.num_batch_shares).num_microbatches
    devices, nodes = plan.mesh.size, plan.mesh.shape[REPLICA]
    ring, across = 1 - 1 / devices, 1 - 1 / nodes
    computed = trained(plan.compute, plan.master)
    rows = zip(jax.tree.leaves(computed), jax.tree.leaves(plan.grads), strict=True)
    is_wide = config.precision.reduce_dtype == "float32"
    total = 0.0
    for compute, grad in rows:
        if not is_wide:
            grad = dataclasses.replace(grad, dtype=compute.dtype)
        if not any(REPLICA in axes for axes in grad.gathered_axes):
            total += passes * 2 * ring * _bytes(grad)
            continue
        total += passes * (across if grad.codec else ring) * _bytes(grad)
        is_of_node = compute.stored != grad.stored
        total += (across if is_of_node else passes * 2 * ring) * _bytes(compute)
    return total


def _bytes(row: ArrayPlan) -> int | float:
    """Bytes of an unsharded array as sent."""
    size = math.prod(row.stored_shape)
    if not row.codec:
        return size * dtype_bytes(row.dtype)
    codec = CODECS[row.codec]
    return size * packed_bytes(codec, codec.block) / codec.block
