"""What `zjax tune` chooses, and the bytes and seconds that a step should take."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import jax

from zjax.config.load import load_config
from zjax.errors import ConfigError, ZjaxError
from zjax.estimate.activations import activation_bytes
from zjax.estimate.mesh import find_obstacle, possible_meshes
from zjax.estimate.trial import Machine, batch_on, weigh
from zjax.models import flops
from zjax.models.build import make_model
from zjax.models.flops import flops_per_weight
from zjax.optim.build import make_optimizer
from zjax.settings import axes, schema
from zjax.settings.batch import resolve_batch
from zjax.settings.parameters import is_held_frozen
from zjax.sharding import mesh as meshes
from zjax.sharding.paths import path_of
from zjax.sharding.placement import abstract_key

REMATS = ("none", "elementwise", "attention_and_mlp", "attention", "full")
"""Policies of `model.remat`, the one that recomputes least first."""
Offload = Literal["none", "state", "blocks"]
"""What is stored in the memory of the host; `blocks` are parameters, besides state."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings to try.

    Args:
        microbatch_size: Sequences per device and microbatch; 0 where `elasticity` says.
        stage: ZeRO stage.
        remat: A value of `model.remat`.
        pipeline: Size of the mesh axis.
        sequence: The same.
        tensor: The same.
        offload: What is stored in the memory of the host.
    """

    microbatch_size: int
    stage: int
    remat: str
    pipeline: int = 1
    sequence: int = 1
    tensor: int = 1
    offload: Offload = "none"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a run by path."""
        state = "derived" if self.offload == "none" else "pinned_host"
        blocks = "pinned_host" if self.offload == "blocks" else "derived"
        sizes = {axis: getattr(self, axis) for axis in axes.OPEN_AXES}
        return {
            "num_microbatches": 0,
            "microbatch_size": self.microbatch_size,
            "zero.stage": self.stage,
            "zero.memory": "device",
            "zero.optimizer_memory": state,
            "zero.parameter_memory": blocks,
            "zero.gradient_memory": "derived",
            "model.remat": self.remat,
            **{f"mesh.{axis}": size for axis, size in sizes.items()},
        }

    def apply(self, config: schema.Config) -> schema.Config:
        """The run with these settings."""
        return load_config(config, self.settings)


def with_batch(config: schema.Config, machine: Machine) -> schema.Config:
    """The run with its global batch size, from which the other two follow."""
    if config.elasticity.microbatch_sizes or config.global_batch_size:
        return dataclasses.replace(config, num_microbatches=0, microbatch_size=0)
    closed = dataclasses.replace(config, mesh=axes.close_axes(config.mesh))
    sizes = resolve_batch(config, _num_shards(closed, machine))
    return dataclasses.replace(
        config,
        global_batch_size=sizes.global_batch_size,
        num_microbatches=0,
        microbatch_size=0,
    )


def candidates(config: schema.Config, machine: Machine) -> Iterator[Candidate]:
    """All settings to choose from, of which some cannot work."""
    opened = dataclasses.replace(config, mesh=open_mesh(config.mesh))
    for mesh in possible_meshes(opened, machine):
        shards = math.prod(getattr(mesh, axis) for axis in axes.BATCH_AXES)
        is_sharded = shards * mesh.sequence > 1
        stages = (0, 1, 2, 3) if is_sharded else (config.zero.stage,)
        sizes = {axis: getattr(mesh, axis) for axis in axes.OPEN_AXES}
        for microbatch in microbatch_sizes(config, shards):
            for stage in stages:
                for remat in REMATS:
                    for offload in get_args(Offload):
                        yield Candidate(
                            microbatch, stage, remat, **sizes, offload=offload
                        )


def microbatch_sizes(config: schema.Config, num_shards: int) -> list[int]:
    """Sizes of a microbatch that divide the rows of a batch shard.

    Example:
        >>> microbatch_sizes(schema.Config(global_batch_size=48), num_shards=4)
        [1, 2, 3, 4, 6, 12]
    """
    if config.elasticity.microbatch_sizes:
        return [0]
    rows, rest = divmod(config.global_batch_size, num_shards)
    return [] if rest else [n for n in range(1, rows + 1) if rows % n == 0]


def given_candidate(config: schema.Config, machine: Machine) -> Candidate | None:
    """The settings as they were given; None if they are not among the candidates."""
    offload = _offload_of(config.zero)
    sizes = {axis: getattr(config.mesh, axis) for axis in axes.OPEN_AXES}
    if offload is None or min(sizes.values()) < 1:
        return None
    try:
        batch = resolve_batch(config, _num_shards(config, machine))
    except ConfigError:
        return None
    elastic = bool(config.elasticity.microbatch_sizes)
    return Candidate(
        0 if elastic else batch.microbatch_size,
        config.zero.stage,
        config.model.remat,
        **sizes,
        offload=offload,
    )


def _offload_of(zero: schema.Zero) -> Offload | None:
    memories = zero.optimizer_memory, zero.parameter_memory
    known: dict[tuple[str, str], Offload] = {
        ("device", "device"): "none",
        ("pinned_host", "device"): "state",
        ("pinned_host", "pinned_host"): "blocks",
    }
    return known.get(memories)


def open_mesh(mesh: schema.Mesh) -> schema.Mesh:
    """A mesh whose axes of one device are to be chosen, unless all sizes are given."""
    sizes = {axis: getattr(mesh, axis) for axis in axes.OPEN_AXES}
    if 0 not in sizes.values() and all(getattr(mesh, x) != -1 for x in axes.AXES):
        return mesh
    opened = {axis: size if size > 1 else 0 for axis, size in sizes.items()}
    return dataclasses.replace(mesh, **opened)


def _num_shards(config: schema.Config, machine: Machine) -> int:
    sizes = meshes.mesh_sizes(config.mesh, machine.num_devices)
    return math.prod(sizes[axis] for axis in axes.BATCH_AXES)


RECOMPUTED = {"none": 0.0, "elementwise": 0.02, "attention_and_mlp": 0.12}
RECOMPUTED |= {"dots": 0.05, "attention": 0.23, "full": 0.34}
"""Share of a step by policy: of a feed-forward four times as wide as the model."""
_UNKNOWN_FLOPS = 1e14
_FLOPS_PER_BYTE = 400
"""Peak FLOPs over bytes per second of device memory."""
_LINK_BYTES, _HOST_BYTES = 2e11, 4e10
"""Per second, between devices of a host and to its memory."""
_FEW_TOKENS = 512
"""A microbatch of so many tokens takes twice the time of its work."""
_LATENCY = 2e-5
"""Seconds of an exchange in a layer, beside its bytes."""
_HIDDEN = 0.5
"""Share of the traffic that hides behind work."""


class Predictor:
    """Predicts steps of one run.

    Args:
        config: The run of `with_batch`.
        machine: The devices.
        kind: Their name.
    """

    def __init__(self, config: schema.Config, machine: Machine, kind: str):
        self._config, self._machine = config, machine
        dtype = config.precision.compute_dtype
        self._flops = (flops.peak_flops(kind, dtype) or _UNKNOWN_FLOPS) / 2
        self._share = _share_of_trained(config)
        self._states = dict[Any, int | float | ZjaxError]()
        self._obstacles = dict[Candidate, str]()

    @property
    def usable_bytes(self) -> int | float:
        """Bytes of a device that a step may take."""
        return self._machine.usable_bytes

    def obstacle(self, candidate: Candidate) -> str:
        """Why a candidate cannot work; empty where there is no reason."""
        if candidate not in self._obstacles:
            config = candidate.apply(self._config)
            mesh = self._mesh(config)
            config = dataclasses.replace(config, mesh=open_mesh(self._config.mesh))
            found = find_obstacle(config, mesh, self._machine, None)
            self._obstacles[candidate] = found or self._misfit(candidate)
        return self._obstacles[candidate]

    def num_bytes(self, candidate: Candidate) -> int | float:
        """Bytes per device of a step of a candidate that can work."""
        config = candidate.apply(self._config)
        mesh = self._mesh(config)
        batch = batch_on(config, mesh)
        alike = dataclasses.replace(candidate, microbatch_size=0, remat="")
        key = alike, batch.num_microbatches > 1
        if key not in self._states:
            self._states[key] = _state_bytes(config, mesh)
        state = self._states[key]
        if isinstance(state, ZjaxError):
            raise state
        sizes = {axis: getattr(mesh, axis) for axis in axes.AXES}
        return state + activation_bytes(config, sizes, batch)

    def seconds(self, candidate: Candidate) -> float:
        """Seconds of a step, to rank candidates by."""
        config = self._sketch(candidate)
        mesh = self._mesh(config)
        shards = math.prod(getattr(mesh, axis) for axis in axes.BATCH_AXES)
        batch = batch_on(config, mesh)
        shares = mesh.tensor * mesh.pipeline
        params = flops.num_params(config.model) / shares
        learned = self._share * params
        number = batch.num_microbatches
        length = config.data.length / mesh.sequence
        tokens = batch.microbatch_size * length
        work = flops.flops_per_token(
            config.model,
            config.data.length,
            causal_attention="half",
            per_weight=flops_per_weight(config),
        )
        seconds = tokens * work / shares / self._flops
        seconds *= (1 + RECOMPUTED[candidate.remat]) * (
            1 + _FEW_TOKENS * mesh.tensor / tokens
        )
        # Weights twice, and those with a gradient and its sum a third time.
        seconds += self._in_memory(4 * params + 10 * learned)
        seconds += _layers_seconds(config, mesh, tokens)
        bubble = 1 + (mesh.pipeline - 1) / number
        copies = shards * mesh.sequence
        owned = learned / (copies if candidate.stage else 1)
        return (
            number * seconds * bubble
            + self._in_memory(28 * owned)
            + _HIDDEN * _zero_traffic(candidate.stage, number, params, learned, copies)
            + _HIDDEN * _host_traffic(candidate, number, params, owned)
        )

    def _misfit(self, candidate: Candidate) -> str:
        """Why its arrays cannot be placed; empty where they can."""
        try:
            self.num_bytes(candidate)
        except ZjaxError as error:
            return str(error.problems[0]).partition(";")[0]
        return ""

    def _in_memory(self, num_bytes: int | float) -> float:
        return num_bytes * _FLOPS_PER_BYTE / (2 * self._flops)

    def _sketch(self, candidate: Candidate) -> schema.Config:
        """The settings that ranking reads, without their checks."""
        sizes = {axis: getattr(candidate, axis) for axis in axes.OPEN_AXES}
        return dataclasses.replace(
            self._config,
            microbatch_size=candidate.microbatch_size,
            mesh=dataclasses.replace(self._config.mesh, **sizes),
        )

    def _mesh(self, config: schema.Config) -> schema.Mesh:
        sizes = meshes.mesh_sizes(config.mesh, self._machine.num_devices)
        return dataclasses.replace(config.mesh, **sizes)


def _share_of_trained(config: schema.Config) -> float:
    """The share of the parameters that have gradients."""
    params, _ = jax.eval_shape(make_model(config).init, abstract_key())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = {path_of(keys): x.size for keys, x in leaves}
    learned = (n for path, n in sizes.items() if not is_held_frozen(path, config))
    return sum(learned) / sum(sizes.values())


def _state_bytes(config: schema.Config, mesh: schema.Mesh) -> int | float | ZjaxError:
    """Bytes of the state, or the error of arrays that cannot be placed."""
    model = make_model(config)
    try:
        return weigh(config, mesh, model, make_optimizer(config, model)).state
    except ZjaxError as error:
        return error


def _layers_seconds(
    config: schema.Config, mesh: schema.Mesh, tokens: int | float
) -> float:
    """Seconds in which layers exchange numbers of two bytes for a microbatch."""
    layers = config.model.num_layers / mesh.pipeline
    size = 2 * tokens * config.model.embed_size
    splits = (mesh.tensor - 1) / mesh.tensor + (mesh.sequence - 1) / mesh.sequence
    number = 4 * ((mesh.tensor > 1) + (mesh.sequence > 1))
    return layers * (8 * size * splits / _LINK_BYTES + number * _LATENCY)


def _zero_traffic(
    stage: int, number: int, params: int | float, learned: int | float, copies: int
) -> float:
    """Seconds that gradients and parameters are on their way between the copies."""
    passes = {0: 2, 1: 2, 2: number + 1, 3: number}[stage]
    sent = passes * learned + (2 * number * params if stage == 3 else 0)
    return 2 * sent * (copies - 1) / copies / _LINK_BYTES


def _host_traffic(
    candidate: Candidate, number: int, params: int | float, owned: int | float
) -> float:
    """Seconds that offloaded arrays are on their way."""
    state = 0 if candidate.offload == "none" else 28 * owned
    blocks = 6 * number * params if candidate.offload == "blocks" else 0
    return (state + blocks) / _HOST_BYTES
