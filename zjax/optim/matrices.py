"""Which parameters are matrices, and along which dims.

Weight decay, Muon and LAMB treat a parameter by its role, and the shape alone does not
tell it: the norm scales of scanned layers have two dims, and so has the bias of an
attention head. Leading dims named `layers` or `experts` only stack
parameters, and are not counted. Where nothing is known of the dims, all are counted.
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
Names = dict[str, Logical]
"""The dims of parameters by path, as far as they are known."""


def named_params(model: Model, mesh: schema.Mesh) -> tuple[Params, Names]:
    """The parameters of a model, and what is known of their dims.

    Args:
        model: Its `init`, which is only traced, and the names of its dims.
        mesh: Translates and adds names.

    Returns:
        Abstract parameters, and dims by path.

    Raises:
        PlanError: Names in `mesh` that match nothing or say nothing.
    """
    params, _ = jax.eval_shape(model.init, abstract_key())
    paths = [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = zip(paths, names_of_dims(model, params, mesh), strict=True)
    return params, {path: dims for path, dims in names if any(dims)}


def of_layers(names: Names) -> Names:
    """The dims of parameters whose layers are stored one by one.

    Args:
        names: Dims by path, where arrays stack their layers.

    Returns:
        The same without that dim.

    Example:
        >>> of_layers({"norm/scale": ("layers", "embed")})
        {'norm/scale': ('embed',)}
    """
    return {
        path: dims[1:] if dims[:1] == ("layers",) else dims
        for path, dims in names.items()
    }


def num_stacked(path: str, names: Names) -> int:
    """Counts the leading dims that only stack parameters.

    Args:
        path: Of the parameter.
        names: Dims by path.

    Returns:
        Their number, 0 where nothing is known.

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
    """Whether a parameter is a matrix or more, and so is subject to weight decay.

    Args:
        path: Of the parameter; one that ends in `bias` or `scale` is a vector.
        num_dims: Of the array.
        names: Dims by path.

    Returns:
        Whether two or more dims are left once the stacking ones are not counted.

    Example:
        >>> is_matrix("query/kernel", 2, {}), is_matrix("query/bias", 2, {})
        (True, False)
    """
    if name_of(path) in VECTORS:
        return False
    return num_dims - num_stacked(path, names) >= 2


def muon_dims(
    path: str, num_dims: int, names: Names
) -> optax.contrib.MuonDimensionNumbers | None:
    """The two sides of a matrix that Muon makes orthogonal.

    Heads and their dims count as one side. Embeddings and the output matrix are left
    to Adam, as is every parameter without exactly two sides.

    Args:
        path: Of the parameter.
        num_dims: Of the array.
        names: Dims by path.

    Returns:
        Input and output dims; None for a parameter that Adam is to update.

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
    sides: list[tuple[int, ...]] = []
    for dim in range(num_stacked(path, names), num_dims):
        if sides and dims[dim] == "head_dim" and dims[dim - 1] in ("heads", "kv_heads"):
            sides[-1] += (dim,)
        else:
            sides.append((dim,))
    return optax.contrib.MuonDimensionNumbers(*sides) if len(sides) == 2 else None
