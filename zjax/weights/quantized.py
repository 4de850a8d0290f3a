"""Quantises the matrices of a Hugging Face source while an export writes them.

Weights are rounded to nearest, or they lie on a grid already, as after GPTQ: then their
scales are given, and codes are recovered without a further rounding.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from zjax.errors import CheckpointError, ConfigError, Problem
from zjax.ops.rounding import scales_to
from zjax.settings import schema
from zjax.weights import mxfp4
from zjax.weights.compressed_tensors import SCHEMES, Scheme
from zjax.weights.families import FAMILIES
from zjax.weights.files import cast
from zjax.weights.grid import codes_on_grid, shared_scales
from zjax.weights.source import Entry, Index, Source
from zjax.weights.tensors import layouts_of

NAMES = (*SCHEMES, mxfp4.NAME)
"""Layouts of quantised matrices: of compressed-tensors, and of gpt-oss."""
FIELD = "--quantize"
_NUM_SHOWN = 3


class Choice(NamedTuple):
    """Tensors of a family: with codes, without, and plain for want of groups."""

    coded: list[str]
    """Matrices that become codes and scales."""
    unfit: list[str]
    """Matrices that stay plain, as groups do not divide the inputs."""
    plain: list[str]
    """Routers, and matrices that stay plain as the caller says."""


def compress(
    source: Source,
    model: schema.Model,
    kind: str,
    name: str,
    *,
    dtype: str = "",
    scales: Source | None = None,
    scheme: Scheme | None = None,
    plain: Collection[str] = (),
) -> tuple[Source, dict[str, Any]]:
    """Quantises the tensors of a family to a layout of Hugging Face checkpoints.

    Args:
        source: Plain tensors of the family, such as `huggingface.model_tensors` gives.
        model: Settings of the model.
        kind: `model_type` of the family.
        name: One of `NAMES`.
        dtype: Dtype of plain tensors and of scales; empty for the dtypes of `source`.
        scales: Scales of weights on a grid, float32, with the names and shapes of
            `source`: the scale of a group, repeated for each weight. None rounds
            weights to nearest: the largest weight of a group takes the last code.
        scheme: Scheme in place of the one of that name, which then names it in
            messages alone.
        plain: Names of matrices that stay plain; not read for mxfp4.

    Returns:
        Tensors of the files, and the `quantization_config` of the config.json.

    Raises:
        ConfigError: The family has no such layout, or no matrix has fitting groups.
        CheckpointError: A dtype does not fit the format. While tensors are read, also:
            a group has several scales, a weight is off the grid, or is not finite.
    """
    if name == mxfp4.NAME:
        return mxfp4.compress(source, model, kind, dtype=dtype, scales=scales)
    scheme = scheme or SCHEMES[name]
    chosen = choose_matrices(source.entries, model, kind, name, scheme, plain)
    _report(scheme, chosen, bool(model.moe))
    found = pack_source(source, chosen.coded, scheme, dtype=dtype, scales=scales)
    left = (*chosen.plain, *chosen.unfit)
    ignore = dict.fromkeys(x.removesuffix(".weight") for x in left)
    return found, scheme.config([*_HEADS[model.kind], *ignore])


def choose_matrices(
    entries: Mapping[str, Entry],
    model: schema.Model,
    kind: str,
    name: str,
    scheme: Scheme,
    plain: Collection[str] = (),
) -> Choice:
    """Chooses the tensors that become codes; see `compress`.

    Raises:
        ConfigError: The family has no such layout, or no matrix has fitting groups.
    """
    matrices, others = _modules_of(model, kind, name, plain)
    fitting = [x for x in matrices if scheme.fits(entries[x].shape[1])]
    unfit = [x for x in matrices if x not in {*fitting}]
    if not fitting:
        problem = f"has groups of {scheme.group} inputs, which divide no matrix"
        raise ConfigError(Problem(FIELD, name, problem, "use w8a8 or fp8"))
    return Choice(fitting, unfit, others)


_HEADS = {"decoder": ("lm_head",), "encoder": ("re:cls[.].*", "re:lm_head[.].*")}
"""Plain modules of a head, some of which share a table and have no tensor."""


def _modules_of(
    model: schema.Model, kind: str, name: str, plain: Collection[str]
) -> tuple[list[str], list[str]]:
    """Lists matrices of torch `Linear` modules to quantise, and modules left plain."""
    matrices, others = list[str](), list[str]()
    for ours, layout in layouts_of(FAMILIES[kind].rows, model):
        if not ours.startswith("blocks.") or ".kernel" not in ours:
            continue
        names = layout.tensors.values()
        if ".router." in ours or {*names} <= {*plain}:
            others += names
        elif layout.row.is_transposed and len(layout.tensor_shape) == 2:
            matrices += names
        else:
            problem = f"has no layout for {layout.first} of {kind}, which is no Linear"
            remedy = "leave out --quantize, or use --format=gguf"
            if len(layout.tensor_shape) > 2:
                remedy = "use mxfp4"
            raise ConfigError(Problem(FIELD, name, problem, remedy))
    # A joined tensor has several arrays.
    return [*dict.fromkeys(matrices)], [*dict.fromkeys(others)]


def _report(scheme: Scheme, chosen: Choice, has_experts: bool) -> None:
    """Warns on process 0 of the number of matrices, and of matrices left plain."""
    if jax.process_index() != 0:
        return
    text = f"{len(chosen.coded)} matrices become {scheme.dtype}"
    if has_experts:
        text += "; vLLM reads these experts, transformers 5 does not"
    if unfit := chosen.unfit:
        more = len(unfit) - _NUM_SHOWN
        names = ", ".join(unfit[:_NUM_SHOWN])
        names += f" and {more} more" if more > 0 else ""
        text += f"; plain, as {scheme.group} does not divide their inputs: {names}"
    logging.warning("%s", text)


def pack_source(
    source: Source,
    names: Sequence[str],
    scheme: Scheme,
    *,
    dtype: str = "",
    scales: Source | None = None,
) -> Source:
    """Replaces the matrices of some names by codes and scales; see `compress`."""
    lacking = [x for x in names if scales is not None and x not in scales.entries]
    if lacking:
        remedy = "give a scale for each weight"
        some = lacking[:_NUM_SHOWN]
        raise CheckpointError(
            *(Problem("tensor", x, "has no scales", remedy) for x in some)
        )
    plain = cast(source.without(names), dtype)
    entries, origins = dict[str, Entry](), dict[str, tuple[str, int]]()
    for name, entry in source.entries.items():
        if name in plain.entries:
            entries[name] = plain.entries[name]
            continue
        stored = scheme.entries(entry.shape, dtype or entry.dtype)
        # Beside each other in the files, in the order of the plain tensors.
        for number, ending in enumerate(scheme.endings):
            entries[name + ending] = stored[number]
            origins[name + ending] = name, number
    matrices = Matrices(source, scheme, scales)

    def read(name: str, index: Index) -> np.ndarray:
        if name not in origins:
            return plain.read(name, index)
        origin, number = origins[name]
        if number == 2:
            return np.array(source.entries[origin].shape, np.int64)[index]
        codes, factors = matrices.read(origin, index[0], entries[f"{origin}_scale"])
        found = factors if number else scheme.store(codes)
        return found[:, index[1]]

    return Source(entries, read)


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Reads codes and scales of plain matrices."""

    source: Source
    scheme: Scheme
    scales: Source | None

    def read(
        self, name: str, rows: slice, scales: Entry
    ) -> tuple[np.ndarray, np.ndarray]:
        """Reads rows of a matrix as float32 codes and as scales of an entry's dtype."""
        index = rows, slice(0, self.source.entries[name].shape[1])
        weights = self.source.read(name, index).astype(np.float32)
        if not np.isfinite(weights).all():
            problem, remedy = "is not finite everywhere", "export another checkpoint"
            raise CheckpointError(Problem("tensor", name, problem, remedy))
        groups = weights.reshape(len(weights), scales.shape[1], -1)
        if self.scales is None:
            largest = np.abs(groups).max(-1)
            # Codes are the nearest for the scales as they are stored.
            stored = scales_to(largest, self.scheme.weights, jnp.dtype(scales.dtype))
            factors = stored.astype(np.float32)
            codes = self.scheme.round(groups / factors[..., np.newaxis])
        else:
            shared = self.scales.read(name, index).astype(np.float32)
            factors = shared_scales(name, shared.reshape(groups.shape))
            dtype = self.source.entries[name].dtype
            codes = codes_on_grid(name, groups, factors, self.scheme.round, dtype)
        return codes.reshape(weights.shape), factors.astype(jnp.dtype(scales.dtype))
