"""Blocks of a decoder, and the matrices that rules round in each."""

from typing import Any, NamedTuple

from zjax.compress.block import BlockLayers
from zjax.compress.experts import Mixture
from zjax.compress.folding import folds_in
from zjax.compress.grid import Grid
from zjax.models.block import segments_of
from zjax.models.recording import Layer, layers_in
from zjax.models.rounded import linear_layers, num_inputs_of
from zjax.models.stack import Decoder, make_stack
from zjax.settings.compress import Compress, Smoothquant
from zjax.settings.quantize import Quantize, Rule
from zjax.settings.schema import Config


class BlockPlace(NamedTuple):
    """A block among the blocks of a model."""

    segment: int
    name: str
    """Name of the segment; empty if there is only one."""
    number: int
    """Index in the segment."""

    @property
    def prefix(self) -> str:
        """Beginning of paths of the block's layers."""
        return f"blocks/{self.name}/" if self.name else "blocks/"

    def named(self, path: str) -> str:
        """Names a layer of the block in messages."""
        return f"{self.prefix}{path}[{self.number}]"


def places_of(decoder: Decoder) -> list[BlockPlace]:
    """Lists the blocks of a model in order."""
    stack, segments = make_stack(decoder), segments_of(decoder.blocks)
    return [
        BlockPlace(index, name, number)
        for index, (name, segment) in enumerate(
            zip(segments, stack.segments, strict=True)
        )
        for number in range(segment.num_blocks)
    ]


def layers_of(decoder: Decoder) -> dict[str, Layer]:
    """Lists the matrices that rules may round, by path of the layer in the model."""
    segments = segments_of(decoder.blocks)
    names = {place.prefix: place.name for place in places_of(decoder)}
    return {
        f"{prefix}{layer.path}": layer
        for prefix, name in names.items()
        for layer in layers_in(segments[name])
    }


def inputs_of(decoder: Decoder) -> dict[str, int]:
    """Counts the inputs of the matrices that rules may round, by path of the layer."""
    inputs = num_inputs_of(linear_layers(decoder))
    return {path: inputs[path] for path in layers_of(decoder)}


class BlockParts(NamedTuple):
    """What rules round in a block."""

    layers: BlockLayers
    """Matrices of all tokens."""
    mixtures: list[Mixture]
    """Matrices of experts."""


def parts_of(
    settings: Compress, config: Config, decoder: Decoder, place: BlockPlace
) -> BlockParts:
    """Lists the matrices of a block that rules round.

    Args:
        settings: Rules and method.
        config: Settings of the model.
        decoder: Decoder with shapes alone.
        place: Block.

    Returns:
        Matrices, grids and folds of the block.
    """
    block: Any = [*segments_of(decoder.blocks).values()][place.segment]
    every, grids = layers_in(block), dict[str, Grid]()
    for layer in every:
        rule = rule_of(settings, f"{place.prefix}{layer.path}")
        if rule is not None and rule.weights != "compute":
            dtype = config.precision.compute_dtype
            grids[layer.path] = Grid(rule.weights, rule.group_size, dtype)
    linears = [x for x in every if x.path in grids and not x.has_experts]
    has_matrices = not isinstance(settings.method, Smoothquant)
    # Factors need one grid, and matrices of which all are rounded.
    folds = [
        fold
        for fold in folds_in(block, has_matrices=has_matrices)
        if len({grids.get(path) for path in fold.consumers} - {None}) == 1
        and grids.keys() >= {*fold.consumers}
    ]
    mixtures = _mixtures(every, grids, config.model.activation)
    return BlockParts(BlockLayers(linears, grids, folds), mixtures)


def _mixtures(
    layers: list[Layer], grids: dict[str, Grid], activation: str
) -> list[Mixture]:
    """Lists the mixtures of a block with experts to round."""
    experts = {layer.path: layer for layer in layers if layer.has_experts}
    found = list[Mixture]()
    for path, up in experts.items():
        folder, _, name = path.rpartition("/")
        both = grids.get(path), grids.get(f"{folder}/down")
        if name == "up" and any(both):
            mixture = folder.removesuffix("/experts")
            down = experts[f"{folder}/down"]
            found.append(Mixture(mixture, up, down, activation, both))
    return found


def rule_of(settings: Compress, path: str) -> Rule | None:
    """Returns the first rule that matches the path of a layer; None without one."""
    return Quantize(rules=settings.rules).rule_of(path)
