"""Weights to compress, of a run or of a Hugging Face checkpoint, block by block."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.checkpoint.contents import digest_files, digest_step
from zjax.checkpoint.start import find_config, open_source, open_weights
from zjax.checkpoint.store import Store
from zjax.config.load import saved_config
from zjax.errors import ConfigError, Problem
from zjax.models.build import make_model
from zjax.models.nnx import nest_named
from zjax.models.stack import Decoder
from zjax.settings.quantize import Quantize
from zjax.settings.schema import Config
from zjax.sharding.placement import abstract_key
from zjax.train.average import Part
from zjax.weights import huggingface, layers
from zjax.weights.files import tensor_name
from zjax.weights.source import Entry, Source, cached, check_same, name_leaves

BLOCKS = "blocks"
"""First part of the paths of the parameters of blocks."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """A decoder with weights that are read by name.

    Args:
        config: Settings of the model.
        decoder: Decoder with shapes alone.
        shapes: Shapes of all parameters by path, blocks stacked.
        source: Weights with layers apart, by names with dots.
        name: What names the weights in messages.
        files: Digest of what tells whether files have changed.
        learned: Rules of a run that learned rounded matrices: the weights have the
            values of the codes. None where adapters were merged into the matrices.
    """

    config: Config
    decoder: Decoder
    shapes: dict[str, Any]
    source: Source
    name: str
    files: str = ""
    learned: Quantize | None = None

    def read_outside(self) -> Any:
        """Reads the parameters outside of the blocks onto the device."""
        outside = [x for x in self.shapes if not x.startswith(f"{BLOCKS}/")]
        found = {x: self._read(tensor_name(x)).astype(self.dtype) for x in outside}
        return nest_named(found)

    def read_block(self, segment: str, number: int) -> dict[str, jax.Array]:
        """Reads a block of a segment, by path in the block, in the dtypes of the files.

        `segment` is the name of the segment; empty if there is only one.
        """
        prefix = f"{BLOCKS}/{segment}/" if segment else f"{BLOCKS}/"
        return {
            path.removeprefix(prefix): self._read(f"{tensor_name(path)}[{number}]")
            for path in self.shapes
            if path.startswith(prefix)
        }

    def digest(self) -> str:
        """Digests the files, and the first block as it is read.

        Files may be replaced by others of the same size and time.
        """
        found = hashlib.sha256(self.files.encode())
        for name in sorted(self.source.entries):
            if name.startswith(f"{BLOCKS}.") and name.endswith("[0]"):
                values = np.ascontiguousarray(self.source.read_all(name))
                found.update(name.encode() + values.tobytes())
        return found.hexdigest()

    def _read(self, name: str) -> jax.Array:
        return jnp.asarray(self.source.read_all(name))

    @property
    def dtype(self) -> str:
        """Dtype of products, and of the weights that go out."""
        return self.config.precision.compute_dtype


def open_run(config: Config, part: str, step: int) -> tuple[Opened, Part]:
    """Opens a checkpoint of a run, and returns the kind of weights.

    Adapters are merged, and matrices are rounded as the run learned to.
    """
    store = Store(str(pathlib.Path(config.directory) / "checkpoints"))
    source, chosen = open_weights(store, part, step, rounds=True)
    saved = saved_config(store.extra(step))
    source = source.renamed({tensor_name(name): name for name in source.entries})
    name = f"{chosen} of step {step} in {config.directory}"
    opened = _opened(config, cached(source), name)
    learned = None if saved.lora else saved.quantize
    files = digest_step(store.path(step))
    return dataclasses.replace(opened, files=files, learned=learned), chosen


def open_huggingface(config: Config) -> Opened:
    """Opens the checkpoint of Hugging Face that `checkpoint.init_from` names."""
    directory = config.checkpoint.init_from
    config_json = find_config(directory)

    def adapt(source: Source, wanted: dict[str, Entry]) -> Source:
        shape = config.model, config.checkpoint
        return huggingface.adapted(source, wanted, config_json, *shape)

    opened = _opened(config, open_source(directory), directory, adapt)
    return dataclasses.replace(opened, files=digest_files(pathlib.Path(directory)))


def open_source_of(
    config: Config, make: Callable[[dict[str, Entry]], Source], name: str
) -> Opened:
    """Opens the source that a function makes of the expected entries, layers apart."""
    return _opened(config, Source({}, unread), name, lambda _, wanted: make(wanted))


def unread(name: str, index: Any) -> Any:
    """Stands for the function that reads an array where names and shapes are enough."""
    raise AssertionError(name)


def _opened(
    config: Config, source: Source, name: str, adapt: Any = lambda source, _: source
) -> Opened:
    """Checks the names of weights against the model, layers apart."""
    if config.model.kind != "decoder":
        problem, remedy = "is not compressed", "give a decoder"
        raise ConfigError(Problem("model.kind", config.model.kind, problem, remedy))
    config = calibrated(config)
    model = make_model(config)
    params, _ = jax.eval_shape(model.init, abstract_key())
    decoder = model.bind(params, {})
    assert isinstance(decoder, Decoder)
    shapes = name_leaves(params)
    expected = layers_apart(shapes)
    found = layers.untiled(adapt(source, expected))
    found = layers.restacked(found, list(expected))
    check_same(expected, found.entries, name, cast=expected)
    return Opened(config, decoder, shapes, found, name)


def calibrated(config: Config) -> Config:
    """Changes settings so that blocks run whole, on one device, without adapters.

    Products have the compute dtype, as the files have.
    """
    model = dataclasses.replace(config.model, mlp_tiles=1, mlp_chunk_tokens=0)
    precision = dataclasses.replace(config.precision, matmul_dtype="compute")
    changes = {"precision": precision, "lora": None, "quantize": None}
    return dataclasses.replace(config, model=model, **changes)


def layers_apart(shapes: Mapping[str, Any]) -> dict[str, Entry]:
    """Returns entries of parameters, a layer of a stack each."""
    expected = dict[str, Entry]()
    for path, leaf in shapes.items():
        name = tensor_name(path)
        if not path.startswith(f"{BLOCKS}/"):
            expected[name] = Entry(leaf.shape, "float32")
            continue
        for number in range(leaf.shape[0]):
            expected[f"{name}[{number}]"] = Entry(leaf.shape[1:], "float32")
    return expected
