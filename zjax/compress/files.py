"""Lists the tensors of the files of compressed weights, by shapes alone."""

import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from zjax.compress.opened import layers_apart, unread
from zjax.compress.parts import layers_of, rule_of
from zjax.errors import ConfigError
from zjax.models.stack import Decoder
from zjax.settings.compress import Compress
from zjax.settings.quantize import Rule
from zjax.settings.schema import Config, Model
from zjax.weights import huggingface, quantized
from zjax.weights.compressed_tensors import Scheme
from zjax.weights.families import FAMILIES
from zjax.weights.source import Entry, Source
from zjax.weights.tensors import layouts_of

RECIPE = "the recipe"
"""Name of the scheme of a recipe in messages."""
_KERNEL = ".kernel["
_LAYOUTS = {
    ("int4", "compute"): ("pack-quantized", "int4"),
    ("int8", "compute"): ("pack-quantized", "int8"),
    ("int8", "int8"): ("int-quantized", "int8"),
    ("float8", "float8"): ("float-quantized", "float8_e4m3fn"),
}
"""Layouts of compressed-tensors by the types of weights and activations."""


class FileLayout(NamedTuple):
    """Tensors of the files, and which of the matrices are codes."""

    kind: str
    """`model_type` of the family."""
    entries: Mapping[str, Entry]
    """Tensors of the files, by name."""
    scheme: Scheme | None = None
    """Codes of compressed-tensors; None where all weights are numbers."""
    why_plain: str = ""
    """Why a recipe has no codes; empty for codes, and without a recipe."""
    coded: frozenset[str] = frozenset()
    """Paths of the layers that go out as codes, such as `blocks/mlp/up`."""
    uncoded: Mapping[str, str] = types.MappingProxyType({})
    """Paths of layers that a rule rounds and that go out as numbers beside codes, and
    why."""
    plain: frozenset[str] = frozenset()
    """Names of tensors with a matrix that no rule rounds."""


def layout_of(
    config: Config,
    decoder: Decoder,
    shapes: Mapping[str, Any],
    settings: Compress | None,
) -> FileLayout:
    """Lists the tensors that go out, of plain or compressed weights.

    Args:
        config: Settings of the model.
        decoder: Decoder with shapes alone.
        shapes: Shapes of all parameters by path, blocks stacked.
        settings: Rules of compression; None for plain weights.

    Returns:
        Tensors of the family that computes the outputs of the model. Codes need equal
        codes and groups wherever a rule rounds.

    Raises:
        ConfigError: No family computes the outputs of the model.
    """
    model, dtype = config.model, config.precision.compute_dtype
    kind = huggingface.find_kind(model, "compress another model")
    names = {
        name.replace(".", "/"): x.shape for name, x in layers_apart(shapes).items()
    }
    arrays = {name: Entry(shape, dtype) for name, shape in names.items()}
    tensors = huggingface.model_tensors(Source(arrays, unread), model, kind, "model")
    plain = FileLayout(kind, tensors.entries)
    if settings is None:
        return plain
    rules = {path: rule_of(settings, path) for path in layers_of(decoder)}
    rounded = {p: x for p, x in rules.items() if x and x.weights != "compute"}
    scheme = _scheme_of(rounded.values())
    if scheme is None:
        why = "compressed-tensors has no such codes for all rules"
        return plain._replace(why_plain=why)
    owners = _layers_by_tensor(model, kind)
    left = frozenset(x for x, paths in owners.items() if not paths <= rounded.keys())
    try:
        choice = quantized.choose_matrices(
            tensors.entries, model, kind, RECIPE, scheme, left
        )
    except ConfigError as error:
        return plain._replace(why_plain=f"{RECIPE} {error.problems[0].problem}")
    packed = quantized.pack_source(tensors, choice.coded, scheme, dtype=dtype)
    coded = frozenset(path for tensor in choice.coded for path in owners[tensor])
    uncoded = dict.fromkeys(rounded.keys() - coded, "layers share a tensor with others")
    for path in (path for tensor in choice.unfit for path in owners[tensor]):
        uncoded[path] = f"groups of {scheme.group} do not divide the inputs"
    return FileLayout(kind, packed.entries, scheme, "", coded, uncoded, left)


def _scheme_of(rules: Iterable[Rule]) -> Scheme | None:
    """Returns the scheme that stores the codes of all rules; None without one."""
    kinds = {(x.weights, x.activations, x.group_size) for x in rules}
    if len(kinds) != 1:
        return None
    ((weights, activations, group),) = kinds
    found = _LAYOUTS.get((weights, activations))
    if found is None:
        return None
    return Scheme(*found, group=group, rounds_inputs=activations != "compute")


def _layers_by_tensor(model: Model, kind: str) -> dict[str, set[str]]:
    """Returns the paths of the layers whose matrices each tensor holds."""
    found = dict[str, set[str]]()
    for ours, layout in layouts_of(FAMILIES[kind].rows, model):
        path, is_kernel, _ = ours.partition(_KERNEL)
        for tensor in layout.tensors.values() if is_kernel else ():
            found.setdefault(tensor, set()).add(path.replace(".", "/"))
    return found
