"""Frozen matrices of blocks as codes of int8 or int4, with adapters beside them.

The codes take the place of `kernel`, and `scales` stands beside it. Reference: QLoRA
(Dettmers et al., arXiv:2305.14314).
"""

import re
from collections.abc import Iterator

from flax import nnx

from zjax.config import schema
from zjax.errors import ConfigError, Problem
from zjax.models import layers
from zjax.ops.quantized import quantize


def quantize_kernels(module: nnx.Module, settings: schema.Lora) -> None:
    """Quantises the frozen matrices of the blocks of a decoder or an encoder.

    Args:
        module: The module, whose layers are changed in place.
        settings: Type and block size; matrices of `also_train` stay as they are.

    Raises:
        ConfigError: Blocks of this size do not divide a matrix, or all are trained.
        PackageError: Qwix is not installed.
    """
    found = [*_frozen_layers(module, settings)]
    problems = [*_problems(found, settings)]
    if problems:
        raise ConfigError(*problems)
    for _, layer in found:
        dim, names = _blocked_dim(layer), layer.kernel.get_metadata()["logical"]
        size = min(settings.block_size, layer.kernel.shape[dim])
        codes, scales = quantize(layer.kernel[...], dim, size, settings.quantize)
        layer.kernel = nnx.Param(codes, logical=names)
        names = (*names[:dim], None, *names[dim + 1 :])
        layer.scales = nnx.data(nnx.Param(scales, logical=names))


def _frozen_layers(
    module: nnx.Module, settings: schema.Lora
) -> Iterator[tuple[str, layers.Linear]]:
    for parts, layer in [*nnx.iter_modules(module)]:
        path = "/".join(map(str, parts))
        if isinstance(layer, layers.Linear) and path.startswith("blocks/"):
            names = [f"{path}/{name}" for name in ("kernel", "scales")]
            patterns = settings.also_train
            if not any(re.search(p, name) for p in patterns for name in names):
                yield path, layer


def _blocked_dim(layer: layers.Linear) -> int:
    """The last input dim of a kernel, which may stack layers."""
    return layer.kernel.ndim - layer.num_outputs - 1


def _problems(
    found: list[tuple[str, layers.Linear]], settings: schema.Lora
) -> Iterator[Problem]:
    size = settings.block_size
    for path, layer in found:
        length = layer.kernel.shape[_blocked_dim(layer)]
        if length % min(size, length):
            divisor = max(n for n in range(1, size) if length % n == 0)
            problem = f"does not divide the {length} inputs of {path}"
            yield Problem("lora.block_size", size, problem, f"use {divisor}")
    if not found:
        problem = "quantises no matrix, as lora.also_train names all of them"
        yield Problem("lora.quantize", settings.quantize, problem, "leave it empty")
