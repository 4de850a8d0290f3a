"""Names of the dims of low-rank adapters: those of the kernel that they add to.

An adapter is thus sharded over the tensor axis as its kernel is: `a` by rows, or `b`
and the lengths by columns.
"""

from collections.abc import Collection, Mapping

from zjax.config.groups import is_adapter
from zjax.typing import Logical


def kernels_of_adapters(paths: Collection[str]) -> dict[str, str]:
    """The path of the kernel of each matrix of an adapter, by its path.

    Example:
        >>> kernels_of_adapters(["up/kernel", "up/lora/a"])
        {'up/lora/a': 'up/kernel'}
    """
    paths = set(paths)
    kernels = {x: f"{_layer(x)}kernel" for x in sorted(paths) if is_adapter(x)}
    return {x: kernel for x, kernel in kernels.items() if kernel in paths}


def name_adapters(
    kernels: Mapping[str, str], names: Mapping[str, Logical]
) -> dict[str, Logical]:
    """Names the dims of adapters by path.

    Args:
        kernels: Result of `kernels_of_adapters`.
        names: One name or None per dim of each parameter, by path.

    Example:
        >>> names = {"up/kernel": ("embed", "mlp"), "up/lora/a": (None,) * 2}
        >>> names["up/lora/b"] = (None, None)
        >>> name_adapters(kernels_of_adapters(names), names)
        {'up/lora/a': ('embed', None), 'up/lora/b': (None, 'mlp')}
    """
    ranks = {path: len(dims) for path, dims in names.items()}

    def one(path: str) -> Logical:
        dims, layer = names[kernels[path]], _layer(path)
        num_before = ranks[f"{layer}lora/a"] - 1
        before, outputs = dims[:num_before], dims[num_before:]
        stack = before[: ranks[f"{layer}lora/b"] - 1 - len(outputs)]
        by_matrix = {
            "a": (*before, None),
            "b": (*stack, None, *outputs),
            "magnitude": (*stack, *outputs),
        }
        return by_matrix[path.rsplit("/", 1)[-1]]

    return {path: one(path) for path in kernels}


def _layer(path: str) -> str:
    """The path of the layer of an adapter, with a slash at its end."""
    return path.rpartition("lora/")[0]
