"""Communication of a train step by link, beside the volume of the ZeRO stage."""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from zjax.observe.collectives import (
    Collective,
    bytes_inside_node,
    bytes_leaving_node,
    mesh_axes,
)
from zjax.ops.tokens import EXCHANGED
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import Plan
from zjax.sharding.roles import trained

TITLE = "what one node (replica) sends in one run of each program"
ON_AVERAGE = "a step on average"


class LinkBytes(NamedTuple):
    """Bytes that one node sends."""

    inside: float
    between: float


def link_bytes(
    collectives: Sequence[Collective], mesh: Mesh | AbstractMesh
) -> LinkBytes:
    """Counts the bytes that one node sends in one run of a program."""
    return LinkBytes(
        bytes_inside_node(collectives, mesh, meshes.REPLICA),
        bytes_leaving_node(collectives, mesh, meshes.REPLICA),
    )


def describe_links(
    programs: Mapping[str, LinkBytes], times: Mapping[str, int], num_steps: int
) -> str:
    """Table of bytes by link, for each program of a run and for the mean step."""
    rows = [
        (name, f"{times[name]:,}", *map(format_bytes, programs[name]))
        for name in programs
    ]
    totals = (
        sum(sent[i] * times[name] for name, sent in programs.items()) / num_steps
        for i in range(2)
    )
    rows.append((ON_AVERAGE, "", *map(format_bytes, totals)))
    columns = ("program", "times in a run", "inside a node", "between nodes")
    return f"{TITLE}\n{render_table(columns, rows, right=(1, 2, 3))}"


SMALL_SHARE = 1 / 1000
"""Buffers below this share of the parameters are summed up on one line."""
CPU_NOTE = (
    "Compiled for CPUs: bf16 is sent as f32, and where the compiler chose the\n"
    "collectives, all-reduce and slice stand for reduce-scatter."
)
CODES_NOTE = "Packed codes of ZeRO++ are not compared: one element may hold two values."
MESSAGES_NOTE = (
    "Replicas send messages of their own, in some steps none; no volume is predicted."
)
STAGES_NOTE = "Transfers between pipeline stages are not compared."
TICKS_NOTE = "ZeRO {stage} communicates in every pipeline tick; no volume is predicted."
UNBOUNDED_NOTE = "A loop whose trip count the compiler does not know is counted once."


def zero_volume(plan: Plan, num_microbatches: int) -> int:
    """Elements that the plan's ZeRO stage moves per device and step.

    With one microbatch, 2 Psi up to stage 2 and 3 Psi at stage 3. Gradients are reduced
    once per step up to stage 1 and once per microbatch from stage 2; parameters are
    gathered once per step up to stage 2 and twice per microbatch at stage 3. Arrays too
    small to split are all-reduced, and so are shards that `replica` copies; experts of
    other devices are not. A secondary partition is gathered once per step. With a
    pipeline the count is per stage of layers, and holds up to ZeRO 1.

    Reference:
        ZeRO, arXiv:1910.02054, section 7.
    """
    if plan.num_batch_shares * plan.num_length_shares == 1:
        return 0
    # A sharded gradient sum is reduced for every microbatch, any other sum once.
    reductions = num_microbatches if plan.splits.grad_sum else 1
    # Sharded parameters are gathered for the forward and the backward pass.
    gathers = 2 * num_microbatches if plan.splits.compute else 1
    total = 0
    computed = trained(plan.compute, plan.master)
    rows = zip(jax.tree.leaves(plan.grads), jax.tree.leaves(computed), strict=True)
    for grad, compute in rows:
        shares = meshes.num_shares(plan.mesh, sum(grad.gathered_axes, ()))
        shard = math.prod(grad.stored.shard_shape(grad.stored_shape))
        if shares > 1:
            total += shard * shares * (reductions + gathers)
        if meshes.num_shares(plan.mesh, _all_reduced_axes(grad)) > 1:
            # An all-reduce counts twice.
            total += 2 * shard * reductions
        # A secondary partition is filled once per step.
        if plan.splits.compute and compute.stored != grad.stored:
            total += math.prod(compute.stored.shard_shape(compute.stored_shape))
    return total


def _all_reduced_axes(grad: ArrayPlan) -> list[str]:
    """Batch and length axes that shard neither a gradient sum nor a term of the sum."""
    sharding = sum(meshes.axes_of(grad.spec, len(grad.shape)), ())
    axes = dict.fromkeys((*meshes.BATCH_AXES, *meshes.ZERO_AXES))
    return [axis for axis in axes if axis not in sharding]


def describe_communication(
    collectives: Sequence[Collective],
    plan: Plan,
    num_microbatches: int,
    *,
    sends_messages: bool = False,
) -> str:
    """Sums up the bytes that a train step sends, by kind and in total.

    Column `overlap` counts collectives with compute between start and end; `Psi` is the
    volume in units of the number of parameters.
    """
    psi = memory.num_params(plan)
    kinds: dict[tuple[str, ...], list[Collective]] = collections.defaultdict(list)
    small = []
    for each in collectives:
        axes = "+".join(mesh_axes(each.groups, plan.mesh))
        kind = kinds[each.op, each.dtype, axes]
        (kind if each.elements >= SMALL_SHARE * psi else small).append(each)
    rows = [(*kind, *_sums(parts, psi)) for kind, parts in kinds.items() if parts]
    rows.append((f"below {SMALL_SHARE:g} Psi", "", "", *_sums(small, psi)))
    rows.append(("total", "", "", *_sums(collectives, psi)))
    columns = ("op", "dtype", "axes", "count", "overlap", "bytes", "Psi")
    bounded = all(each.is_bounded for each in collectives)
    return "\n".join(
        [
            f"what one device sends in a train step, Psi = {psi:,} parameters",
            render_table(columns, rows, right=range(3, 7)),
            "",
            _describe_volume(collectives, plan, num_microbatches, sends_messages),
            *([CODES_NOTE] if plan.is_coded else []),
            *([MESSAGES_NOTE] if sends_messages else []),
            *_pipeline_notes(plan),
            *([] if bounded else [UNBOUNDED_NOTE]),
        ]
    )


def _sums(parts: Sequence[Collective], psi: int) -> tuple[str, ...]:
    """Cells of a row of the table: count, overlap, bytes and volume."""
    return (
        f"{sum(each.times for each in parts):,}",
        f"{sum(each.times for each in parts if each.overlap):,}",
        format_bytes(sum(each.wire_bytes for each in parts)),
        f"{sum(each.volume for each in parts) / psi:.3f}",
    )


def _describe_volume(
    collectives: Iterable[Collective],
    plan: Plan,
    num_microbatches: int,
    sends_messages: bool,
) -> str:
    """Table of moved elements, beside the volume of the ZeRO stage."""
    axes = [
        a for a in (*meshes.BATCH_AXES, *meshes.ZERO_AXES) if plan.mesh.shape[a] > 1
    ]
    volume = exchanged = 0
    for each in collectives:
        # Exchanges of tokens share axes with ZeRO, but belong to no stage.
        if EXCHANGED in each.op_name:
            exchanged += each.volume
        elif set(axes).intersection(mesh_axes(each.groups, plan.mesh)):
            volume += each.volume
    stage = f"ZeRO {plan.stage} should move"
    if num_microbatches > 1:
        stage += f" for {num_microbatches} microbatches"
    step = f"this step moves over {' and '.join(dict.fromkeys(axes)) or 'no axis'}"
    volumes = {step: volume}
    if not (_communicates_in_ticks(plan) or plan.is_coded or sends_messages):
        volumes[stage] = zero_volume(plan, num_microbatches)
    if exchanged:
        volumes["tokens move to experts and back"] = exchanged
    psi = memory.num_params(plan)
    rows = [(name, f"{n:,}", f"{n / psi:.3f}") for name, n in volumes.items()]
    return render_table(("volume", "elements", "Psi"), rows, right=(1, 2))


def _communicates_in_ticks(plan: Plan) -> bool:
    """Whether every pipeline tick reduces gradients."""
    return plan.mesh.shape[meshes.PIPELINE] > 1 and plan.splits.grad_sum


def _pipeline_notes(plan: Plan) -> list[str]:
    """Notes on communication that a pipeline adds or hides."""
    notes = [STAGES_NOTE] if plan.mesh.shape[meshes.PIPELINE] > 1 else []
    if _communicates_in_ticks(plan):
        notes.append(TICKS_NOTE.format(stage=plan.stage))
    return notes
