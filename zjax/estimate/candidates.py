"""Candidates of `zjax tune`, and predictions of bytes and seconds of a step."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax

from zjax.config.load import load_config
from zjax.errors import ConfigError, ZjaxError
from zjax.estimate.activations import activation_bytes, sent_bytes
from zjax.estimate.mesh import (
    close_unused,
    find_obstacle,
    possible_meshes,
    row_bytes,
)
from zjax.estimate.state import batch_on, state_bytes
from zjax.estimate.traced import run_flops
from zjax.estimate.trial import Machine
from zjax.models import flops
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.settings import axes, schema
from zjax.settings.batch import resolve_batch
from zjax.settings.parameters import is_held_frozen
from zjax.sharding import mesh as meshes
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key
from zjax.typing import Batch, Model

REMATS = ("none", "elementwise", "attention_and_mlp", "attention", "full")
"""Policies of `model.remat`, by increasing recomputation."""
Offload = Literal["none", "state", "blocks"]
"""Arrays stored in host memory; `blocks` offloads parameters besides the state."""
_OWN: tuple[Offload, ...] = ("none", "state")
"""Offload of models of the user."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings that a trial may measure.

    Args:
        microbatch_size: Sequences per device and microbatch; 0 if `elasticity` sets
            the size.
        stage: ZeRO stage, 0 to 3.
        remat: Policy of `model.remat`; empty for a model of the user.
        pipeline: Size of the pipeline axis.
        sequence: Size of the sequence axis.
        tensor: Size of the tensor axis.
        offload: Arrays stored in host memory.
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
        """Settings of the candidate by path."""
        memory = "pinned_host" if self.offload == "blocks" else "device"
        host = {"kind": "pinned_host", "parameter_memory": memory}
        host |= {"gradient_memory": "device"}
        sizes = {axis: getattr(self, axis) for axis in axes.OPEN_AXES}
        return {
            "num_microbatches": 0,
            "microbatch_size": self.microbatch_size,
            "zero.stage": self.stage,
            "zero.offload": None if self.offload == "none" else host,
            **({"model.remat": self.remat} if self.remat else {}),
            **{f"mesh.{axis}": size for axis, size in sizes.items()},
        }

    def apply(self, config: schema.Config) -> schema.Config:
        """Applies the settings of the candidate to a config."""
        settings = self.settings
        if _offload_of(config.zero) == self.offload:
            # As given, with settings that no candidate varies.
            del settings["zero.offload"]
        return load_config(config, settings)


def with_batch(config: schema.Config, machine: Machine) -> schema.Config:
    """Config with a global batch size only, from which microbatch sizes follow."""
    if config.elasticity or config.global_batch_size:
        return dataclasses.replace(config, num_microbatches=0, microbatch_size=0)
    closed = dataclasses.replace(config, mesh=axes.close_axes(config.mesh))
    sizes = resolve_batch(config, _num_shards(closed, machine))
    return dataclasses.replace(
        config,
        global_batch_size=sizes.global_batch_size,
        num_microbatches=0,
        microbatch_size=0,
    )


class Own(NamedTuple):
    """A model of the user with a global batch and an optimizer."""

    model: Model
    batch: Batch
    tx: Any


def candidates(
    config: schema.Config, machine: Machine, own: Own | None = None
) -> Iterator[Candidate]:
    """Yields all candidates; some cannot work. Mesh axes above 1 stay as configured."""
    mesh = open_mesh(config.mesh)
    # The loss of the user recomputes as it is written, and has no blocks.
    remats, offloads = (REMATS, get_args(Offload)) if own is None else ([""], _OWN)
    if own:
        mesh = close_unused(mesh, own.model, own.batch)
    opened = dataclasses.replace(config, mesh=mesh)
    for mesh in possible_meshes(opened, machine):
        shards = math.prod(getattr(mesh, axis) for axis in axes.BATCH_AXES)
        is_sharded = shards * mesh.sequence > 1
        stages = (0, 1, 2, 3) if is_sharded else (config.zero.stage,)
        sizes = {axis: getattr(mesh, axis) for axis in axes.OPEN_AXES}
        for microbatch in microbatch_sizes(config, shards):
            for stage in stages:
                for remat in remats:
                    for offload in offloads:
                        yield Candidate(
                            microbatch, stage, remat, **sizes, offload=offload
                        )


def microbatch_sizes(config: schema.Config, num_shards: int) -> list[int]:
    """Microbatch sizes that divide the rows of a batch shard.

    Example:
        >>> microbatch_sizes(schema.Config(global_batch_size=48), num_shards=4)
        [1, 2, 3, 4, 6, 12]
    """
    if config.elasticity:
        return [0]
    rows, rest = divmod(config.global_batch_size, num_shards)
    return [] if rest else [n for n in range(1, rows + 1) if rows % n == 0]


def given_candidate(
    config: schema.Config, machine: Machine, own: Own | None = None
) -> Candidate | None:
    """Candidate of the given settings; None if no candidate has them."""
    offload = _offload_of(config.zero)
    sizes = {axis: getattr(config.mesh, axis) for axis in axes.OPEN_AXES}
    if offload is None or min(sizes.values()) < 1:
        return None
    try:
        batch = resolve_batch(config, _num_shards(config, machine))
    except ConfigError:
        return None
    return Candidate(
        0 if config.elasticity else batch.microbatch_size,
        config.zero.stage,
        "" if own else config.model.remat,
        **sizes,
        offload=offload,
    )


def _offload_of(zero: schema.Zero) -> Offload | None:
    """Offload choice of ZeRO settings; None for memories that no candidate uses."""
    memories = zero.optimizer_memory, zero.placement.parameter_memory
    known: dict[tuple[str, str], Offload] = {
        ("device", "device"): "none",
        ("pinned_host", "device"): "state",
        ("pinned_host", "pinned_host"): "blocks",
    }
    return known.get(memories)


def open_mesh(mesh: schema.Mesh) -> schema.Mesh:
    """Opens mesh axes of size 1 or less, unless all sizes are given."""
    sizes = {axis: getattr(mesh, axis) for axis in axes.OPEN_AXES}
    if 0 not in sizes.values() and all(getattr(mesh, x) != -1 for x in axes.AXES):
        return mesh
    opened = {axis: size if size > 1 else 0 for axis, size in sizes.items()}
    return dataclasses.replace(mesh, **opened)


def _num_shards(config: schema.Config, machine: Machine) -> int:
    """Number of batch shards of a config on a machine."""
    sizes = meshes.mesh_sizes(config.mesh, machine.num_devices)
    return math.prod(sizes[axis] for axis in axes.BATCH_AXES)


RECOMPUTED = {"": 0.0, "none": 0.0, "elementwise": 0.02, "attention_and_mlp": 0.12}
RECOMPUTED |= {"dots": 0.05, "attention": 0.23, "full": 0.34}
"""Fraction of a step recomputed by each policy, for a 4x wide feed-forward."""
_UNKNOWN_FLOPS = 1e14
_FLOPS_PER_BYTE = 400
"""Peak FLOP/s over bytes per second of device memory."""
_LINK_BYTES, _HOST_BYTES = 2e11, 4e10
"""Bytes per second between devices of a host, and to host memory."""
_FEW_TOKENS = 512
"""Tokens of a microbatch that takes twice the time of its matmuls."""
_LATENCY = 2e-5
"""Seconds of latency of an exchange in a layer."""
_HIDDEN = 0.5
"""Fraction of the traffic that counts, after overlap with computation."""


class Predictor:
    """Predicts memory and time of steps of one run.

    Args:
        config: Settings of the run, from `with_batch`.
        machine: Devices to predict for.
        kind: Kind of the devices, which names the peak FLOP/s.
        own: Model of the user; None for the model of the config. The exchanges that the
            compiler inserts into a loss of the user are not predicted.
    """

    def __init__(
        self,
        config: schema.Config,
        machine: Machine,
        kind: str,
        own: Own | None = None,
    ):
        self._config, self._machine, self._own = config, machine, own
        dtype = config.precision.compute_dtype
        # Matmuls are assumed to reach half of the peak.
        self._flops = (flops.peak_flops(kind, dtype) or _UNKNOWN_FLOPS) / 2
        self._model = model = own.model if own else make_model(config)
        self._count_rows = row_bytes(model, own.batch, dtype) if own else None
        self._length = _num_positions(own.batch) if own else config.data.length
        self._num_params, self._num_trained = _count_params(config, model)
        work = run_flops(model, own.batch if own else model.inputs, config)
        self._flops_per_token = work.seen / self._length
        self._states = dict[Any, int | float | ZjaxError]()
        self._made = dict[bool, tuple[Model, Any]]()
        self._sent = dict[schema.Mesh, float]()
        self._obstacles = dict[Candidate, str]()
        self._bytes = dict[Candidate, int | float]()

    @property
    def usable_bytes(self) -> int | float:
        """Bytes of a device that a step may take."""
        return self._machine.usable_bytes

    def obstacle(self, candidate: Candidate) -> str:
        """Reason why a candidate cannot work; empty if it can."""
        if candidate not in self._obstacles:
            config = candidate.apply(self._config)
            mesh = self._mesh(config)
            config = dataclasses.replace(config, mesh=open_mesh(self._config.mesh))
            tx, is_own = self._own.tx if self._own else None, self._own is not None
            found = find_obstacle(config, mesh, self._machine, tx, user_model=is_own)
            self._obstacles[candidate] = found or self._misfit(candidate)
        return self._obstacles[candidate]

    def num_bytes(self, candidate: Candidate) -> int | float:
        """Predicted bytes per device of a step of a candidate that can work."""
        if candidate not in self._bytes:
            self._bytes[candidate] = self._count_bytes(candidate)
        return self._bytes[candidate]

    def _count_bytes(self, candidate: Candidate) -> int | float:
        """Counts the bytes of the state and of the activations."""
        config = candidate.apply(self._config)
        mesh = self._mesh(config)
        batch = batch_on(config, mesh)
        # State bytes do not depend on microbatch size and remat: planning is slow, so
        # cache.
        alike = dataclasses.replace(candidate, microbatch_size=0, remat="")
        key = alike, batch.num_microbatches > 1
        if key not in self._states:
            self._states[key] = self._state_bytes(config, mesh)
        state = self._states[key]
        if isinstance(state, ZjaxError):
            raise state
        if self._count_rows:
            return state + self._count_rows(batch.microbatch_size, mesh)
        sizes = {axis: getattr(mesh, axis) for axis in axes.AXES}
        return state + activation_bytes(config, sizes, batch, self._model)

    def seconds(self, candidate: Candidate) -> float:
        """Predicted seconds of a step, to rank candidates by."""
        config = self._sketch(candidate)
        mesh = self._mesh(config)
        shards = math.prod(getattr(mesh, axis) for axis in axes.BATCH_AXES)
        batch = batch_on(config, mesh)
        shares = mesh.tensor * mesh.pipeline
        params, learned = self._num_params / shares, self._num_trained / shares
        number = batch.num_microbatches
        length = self._length / mesh.sequence
        tokens = batch.microbatch_size * length
        seconds = tokens * self._flops_per_token / shares / self._flops
        seconds *= (1 + RECOMPUTED[candidate.remat]) * (
            1 + _FEW_TOKENS * mesh.tensor / tokens
        )
        # Bytes of bf16 weights in forward and backward (4); trained weights once more
        # (2), and their float32 gradient sum, read and written (8).
        seconds += self._in_memory(4 * params + 10 * learned)
        seconds += self._exchange_seconds(config, mesh, batch.microbatch_size)
        # Idle time of 1F1B, relative to the busy time.
        bubble = 1 + (mesh.pipeline - 1) / number
        # ZeRO shards over the devices of a sequence, too.
        copies = shards * mesh.sequence
        owned = learned / (copies if candidate.stage else 1)
        return (
            number * seconds * bubble
            + self._in_memory(28 * owned)
            + _HIDDEN * _zero_traffic(candidate.stage, number, params, learned, copies)
            + _HIDDEN * _host_traffic(candidate, number, params, owned)
        )

    def _state_bytes(
        self, config: schema.Config, mesh: schema.Mesh
    ) -> int | float | ZjaxError:
        """Bytes of the state, or the error of arrays that cannot be placed."""
        is_offloaded = config.zero.offloads_state
        # Offload stores layers apart, which changes model and optimizer.
        if is_offloaded not in self._made:
            model, _, tx = self._own or Own(make_model(config), {}, None)
            tx = make_optimizer(config, model) if tx is None else tx
            self._made[is_offloaded] = model, tx
        try:
            config = dataclasses.replace(config, mesh=mesh)
            return state_bytes(config, *self._made[is_offloaded])
        except ZjaxError as error:
            return error

    def _misfit(self, candidate: Candidate) -> str:
        """Reason why arrays of a candidate cannot be placed; empty if they can."""
        try:
            self.num_bytes(candidate)
        except ZjaxError as error:
            return str(error.problems[0]).partition(";")[0]
        return ""

    def _in_memory(self, num_bytes: int | float) -> float:
        """Seconds to read or write bytes of device memory."""
        return num_bytes * _FLOPS_PER_BYTE / (2 * self._flops)

    def _exchange_seconds(
        self, config: schema.Config, mesh: schema.Mesh, num_rows: int
    ) -> float:
        """Seconds of the collectives of all layers, for one microbatch."""
        if self._own:
            return 0.0
        sizes = {axis: getattr(mesh, axis) for axis in axes.AXES}
        split = {axis: sizes[axis] for axis in (meshes.SEQUENCE, meshes.TENSOR)}
        if mesh not in self._sent:
            try:
                self._sent[mesh] = sent_bytes(config, sizes, 1, self._model).total()
            except (ZjaxError, ValueError):  # a mesh with an obstacle
                self._sent[mesh] = math.inf
        number = 4 * sum(size > 1 for size in split.values())
        latency = number * _LATENCY * config.model.num_layers / mesh.pipeline
        return num_rows * self._sent[mesh] / _LINK_BYTES + latency

    def _sketch(self, candidate: Candidate) -> schema.Config:
        """Config of the settings that ranking reads, without checks."""
        sizes = {axis: getattr(candidate, axis) for axis in axes.OPEN_AXES}
        return dataclasses.replace(
            self._config,
            microbatch_size=candidate.microbatch_size,
            mesh=dataclasses.replace(self._config.mesh, **sizes),
            # `RECOMPUTED` has the share of the policy.
            model=dataclasses.replace(self._config.model, remat="none"),
        )

    def _mesh(self, config: schema.Config) -> schema.Mesh:
        """Mesh settings with all axis sizes known."""
        sizes = meshes.mesh_sizes(config.mesh, self._machine.num_devices)
        return dataclasses.replace(config.mesh, **sizes)


def _num_positions(batch: Batch) -> int:
    """Number of positions of a row, such as tokens: the second dim of the batch."""
    return max((x.shape[1] for x in jax.tree.leaves(batch) if x.ndim > 1), default=1)


def _count_params(config: schema.Config, model: Model) -> tuple[int, int]:
    """Counts the parameters of a run, and the trained parameters."""
    params, _ = jax.eval_shape(model.init, abstract_key())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = {path_of(keys): x.size for keys, x in leaves}
    learned = (n for path, n in sizes.items() if not is_held_frozen(path, config))
    return sum(sizes.values()), sum(learned)


def _zero_traffic(
    stage: int, number: int, params: int | float, learned: int | float, copies: int
) -> float:
    """Seconds of ZeRO's gradient reduction and parameter gathering."""
    # An all-reduce passes gradients twice. Stages 2 and 3 reduce-scatter per
    # microbatch; stage 2 gathers parameters once.
    passes = {0: 2, 1: 2, 2: number + 1, 3: number}[stage]
    sent = passes * learned + (2 * number * params if stage == 3 else 0)
    return 2 * sent * (copies - 1) / copies / _LINK_BYTES


def _host_traffic(
    candidate: Candidate, number: int, params: int | float, owned: int | float
) -> float:
    """Seconds of transfers of offloaded arrays."""
    state = 0 if candidate.offload == "none" else 28 * owned
    blocks = 6 * number * params if candidate.offload == "blocks" else 0
    return (state + blocks) / _HOST_BYTES
