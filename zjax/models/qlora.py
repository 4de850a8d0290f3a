"""QLoRA: frozen matrices of blocks as int8 or int4 codes, with adapters.

Codes take the place of `kernel`; `scales` stands beside `kernel`. Reference: QLoRA
(Dettmers et al., arXiv:2305.14314).
"""

import re
from collections.abc import Iterator, Sequence

from flax import nnx

from zjax.errors import ConfigError, Problem
from zjax.models import layers
from zjax.ops.rounding import group_size, quantize_blocks
from zjax.settings import schema


def quantize_kernels(
    module: nnx.Module, settings: schema.Codes, also_train: Sequence[str]
) -> None:
    """Quantises the block matrices that `also_train` does not name, in place."""
    found = [*_frozen_layers(module, also_train)]
    problems = [*_problems(found, settings)]
    if problems:
        raise ConfigError(*problems)
    for _, layer in found:
        dim, names = _blocked_dim(layer), layer.kernel.get_metadata()["logical"]
        size = group_size(layer.kernel.shape[dim], settings.block_size)
        codes, scales = quantize_blocks(layer.kernel[...], dim, size, settings.kind)
        layer.kernel = nnx.Param(codes, logical=names)
        # The number of blocks need not divide over devices: scales are not sharded
        # there.
        names = (*names[:dim], None, *names[dim + 1 :])
        layer.scales = nnx.data(nnx.Param(scales, logical=names))


def _frozen_layers(
    module: nnx.Module, also_train: Sequence[str]
) -> Iterator[tuple[str, layers.Linear]]:
    """Yields path and layer of each block matrix that `also_train` does not name."""
    # A list: the caller changes the layers while it iterates.
    for parts, layer in [*nnx.iter_modules(module)]:
        path = "/".join(map(str, parts))
        if isinstance(layer, layers.Linear) and path.startswith("blocks/"):
            names = [f"{path}/{name}" for name in ("kernel", "scales")]
            if not any(re.search(p, name) for p in also_train for name in names):
                yield path, layer


def _smallest_block(length: int) -> int:
    """Returns the smallest block above 1 that divides a length."""
    return next(n for n in range(2, length + 1) if length % n == 0)


def _blocked_dim(layer: layers.Linear) -> int:
    """Returns the last input dim of a kernel, which may stack layers."""
    return layer.kernel.ndim - layer.num_outputs - 1


def _problems(
    found: list[tuple[str, layers.Linear]], settings: schema.Codes
) -> Iterator[Problem]:
    """Yields problems of the block size, and of a model without frozen matrices."""
    size = settings.block_size
    lengths = {path: x.kernel.shape[_blocked_dim(x)] for path, x in found}
    single = {path: n for path, n in lengths.items() if group_size(n, size) == 1 < n}
    if single:
        path, length = next(iter(single.items()))
        enough = max(_smallest_block(n) for n in single.values())
        problem = f"lets none of the {length} inputs of {path} share a scale"
        field = "lora.quantize.block_size"
        yield Problem(field, size, problem, f"use {enough} or more")
    if not found:
        problem = "quantises no matrix, as lora.also_train names all of them"
        yield Problem("lora.quantize", settings.kind, problem, "leave it out")
