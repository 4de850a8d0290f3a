"""Stacks of a decoder with linear layers that record, or round, inputs."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from zjax.models.block import Block
from zjax.models.layers import Linear
from zjax.models.mixture import ExpertMatrices, MixtureOfExperts
from zjax.models.stack import Decoder, make_stack
from zjax.settings.quantize import Rule
from zjax.typing import Stack

_PLAIN = ("shared_gate", "coefficient")
"""Layers of few outputs that weight branches, which stay as they are."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A matrix of a block, or a matrix of each expert.

    Args:
        path: Path in the parameters of the block, such as `attention/query`.
        num_inputs: Dims of the kernel that are inputs.
        has_experts: Whether the kernel has a matrix for each index of the first dim.
    """

    path: str
    num_inputs: int
    has_experts: bool = False

    @property
    def kernel(self) -> str:
        """Path of the kernel."""
        return f"{self.path}/kernel"


def layers_in(block: nnx.Module) -> list[Layer]:
    """Lists the matrices of a block that can be rounded."""
    found = list[Layer]()
    for path, module in _modules(block):
        if isinstance(module, Linear) and not path.endswith(_PLAIN):
            found.append(Layer(path, module.num_inputs))
        elif isinstance(module, ExpertMatrices):
            both = (f"{path}/up", f"{path}/down")
            found += [Layer(each, 1, has_experts=True) for each in both]
    return found


def blocks_in(block: nnx.Module) -> dict[str, Block]:
    """Returns the layers of a block by path; the path of the only layer is empty."""
    found = {path: x for path, x in _modules(block) if isinstance(x, Block)}
    return found


def _modules(module: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Yields modules by path."""
    for path, found in nnx.iter_modules(module):
        yield "/".join(map(str, path)), found


class Recorder:
    """Collects, while a block is traced, what enters the matrices."""

    def __init__(self) -> None:
        self.inputs: dict[str, jax.Array] = {}
        """Inputs by path of the layer; equal arrays are one object."""
        self.experts: dict[str, tuple[jax.Array, jax.Array]] = {}
        """Tokens, and the experts of each, by path of the mixture."""

    def take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns inputs and experts since the last call."""
        found = self.inputs, self.experts
        self.inputs, self.experts = {}, {}
        return found

    def record(self, path: str, x: jax.Array) -> None:
        """Records the inputs of a layer."""
        self.inputs[path] = x

    def record_experts(self, path: str, x: jax.Array) -> Callable[[Any], None]:
        """Records the tokens of a mixture; returns a function of the experts."""

        def record(experts: jax.Array) -> None:
            self.experts[path] = x, experts

        return record


def recording_stack(decoder: Decoder, recorder: Recorder) -> Stack:
    """Makes a stack with blocks that tell a recorder the inputs of matrices.

    Args:
        decoder: Decoder with shapes alone, which is changed and changed back.
        recorder: Reads the inputs while a block is traced.
    """
    return _with_inputs(
        decoder,
        lambda path: functools.partial(recorder.record, path),
        lambda path: functools.partial(recorder.record_experts, path),
    )


def rounding_stack(decoder: Decoder, rule_of: Callable[[str], Rule | None]) -> Stack:
    """Makes a stack that rounds what enters the linear layers, and no weights.

    Args:
        decoder: Decoder with shapes alone, which is changed and changed back.
        rule_of: Function from the path of a layer to the rule of the layer.
    """
    changed = dict[Any, Any]()
    for path, module in _modules(decoder.blocks):
        if isinstance(module, Linear) and (rule := rule_of(path)) is not None:
            changed[module] = module.rounding
            module.rounding = dataclasses.replace(rule, weights="compute")
    try:
        return make_stack(decoder)
    finally:
        for module, rounding in changed.items():
            module.rounding = rounding


def _with_inputs(
    decoder: Decoder,
    of_linear: Callable[[str], Any],
    of_mixture: Callable[[str], Any],
) -> Stack:
    """Makes a stack of a decoder with layers that call functions of inputs."""
    changed = list[Any]()
    for path, module in _modules(decoder.blocks):
        if isinstance(module, Linear):
            module.on_input = of_linear(path)
        elif isinstance(module, MixtureOfExperts):
            module.on_input = of_mixture(path)
        else:
            continue
        changed.append(module)
    try:
        return make_stack(decoder)
    finally:
        for module in changed:
            module.on_input = None


def head_logits(
    decoder: Decoder,
) -> Callable[..., jax.Array]:
    """Returns a function from head parameters, table and states to float32 logits."""
    graph, _ = nnx.split(decoder.head)
    return lambda params, table, x: nnx.merge(graph, params).logits(x, table)
