"""Which parameters are matrices, and along which dims.

Weight decay, Muon and LAMB treat a parameter by its role, which its shape does not
show: the norm scales of scanned layers have two dims, and so has the bias of an
attention head. Leading dims named `layers` or `experts` only stack parameters and do
not count. Parameters without dim names count all their dims.
"""

import jax
import optax

from zjax.config import schema
from zjax.sharding.naming import names_of_dims
from zjax.sharding.paths import name_of, path_of
from zjax.sharding.placement import abstract_key
from zjax.typing import Logical, Model, Params

STACKED = ("layers", "experts")
VECTORS = ("bias", "scale")
_ONE_SIDE = ("heads", "head_dim"), ("kv_heads", "head_dim"), ("gates", "mlp")
Names = dict[str, Logical]
"""Dim names of parameters by path, where known."""


def named_params(model: Model, mesh: schema.Mesh) -> tuple[Params, Names]:
    """Traces the abstract parameters of a model, and their dim names by path.

    Raises:
        PlanError: Names in `mesh` that match nothing or say nothing.
    """
    params, _ = jax.eval_shape(model.init, abstract_key())
    paths = [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = zip(paths, names_of_dims(model, params, mesh), strict=True)
    return params, {path: dims for path, dims in names if any(dims)}


def without_layers(names: Names) -> Names:
    """Drops the dim of stacked layers, for parameters stored layer by layer.

    Example:
        >>> without_layers({"norm/scale": ("layers", "embed")})
        {'norm/scale': ('embed',)}
    """
    return {
        path: dims[1:] if dims[:1] == ("layers",) else dims
        for path, dims in names.items()
    }


def num_stacked(path: str, names: Names) -> int:
    """Number of leading dims that only stack parameters; 0 for a path without names.

    Example:
        >>> num_stacked("norm/scale", {"norm/scale": ("layers", "embed")})
        1
    """
    count = 0
    for name in names.get(path, ()):
        if name not in STACKED:
            break
        count += 1
    return count


def is_matrix(path: str, num_dims: int, names: Names) -> bool:
    """Whether a parameter has two or more sides, and so decays.

    `heads` and `head_dim`, or `gates` and `mlp`, count as one side. A path that ends in
    `bias` or `scale` is a vector.

    Example:
        >>> is_matrix("query/kernel", 2, {}), is_matrix("query/bias", 2, {})
        (True, False)
    """
    if name_of(path) in VECTORS:
        return False
    return len(_sides(path, num_dims, names)) >= 2


def muon_dims(
    path: str, num_dims: int, names: Names
) -> optax.contrib.MuonDimensionNumbers | None:
    """Input and output dims of a matrix that Muon orthogonalizes; None is left to Adam.

    Adam gets embeddings, the output matrix and parameters without exactly two sides,
    as `is_matrix` counts them.

    Example:
        >>> muon_dims("query", 3, {"query": ("embed", "heads", "head_dim")})
        MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1, 2))

    Reference:
        Jordan et al., 2024, https://kellerjordan.github.io/posts/muon
    """
    dims = names.get(path, (None,) * num_dims)
    embedding = "vocab" in dims or name_of(path) == "embedding"
    if embedding or not is_matrix(path, num_dims, names):
        return None
    sides = _sides(path, num_dims, names)
    return optax.contrib.MuonDimensionNumbers(*sides) if len(sides) == 2 else None


def _sides(path: str, num_dims: int, names: Names) -> list[tuple[int, ...]]:
    """Dims that do not stack, those of one side together."""
    dims = names.get(path, (None,) * num_dims)
    sides: list[tuple[int, ...]] = []
    for dim in range(num_stacked(path, names), num_dims):
        if sides and dims[dim - 1 : dim + 1] in _ONE_SIDE:
            sides[-1] += (dim,)
        else:
            sides.append((dim,))
    return sides
