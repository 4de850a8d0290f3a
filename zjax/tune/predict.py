"""Bytes and seconds of a step with candidate settings, without devices.

The bytes are those of `zjax.budget`. The seconds only rank candidates: work over half
of the peak, and traffic over the links of a usual machine.
"""

import dataclasses
import math
from typing import Any

import jax

from zjax.budget.activations import activation_bytes
from zjax.budget.mesh import find_obstacle
from zjax.budget.trial import Machine, batch_on, weigh
from zjax.config import axes, schema
from zjax.config.groups import is_held_frozen
from zjax.errors import ZjaxError
from zjax.models.build import make_model
from zjax.observe import flops
from zjax.observe.weight_flops import flops_per_weight
from zjax.optim.build import make_optimizer
from zjax.sharding import mesh as meshes
from zjax.sharding.paths import path_of
from zjax.sharding.placement import abstract_key
from zjax.tune.space import Candidate, open_mesh

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
