"""Parameter groups by path, and the arrays that optimizers treat as matrices."""

import difflib
import re
from typing import Any

import jax
import optax

from zjax.errors import ConfigError, Problem
from zjax.settings import schema
from zjax.settings.parameters import FROZEN, Groups, label_of
from zjax.sharding.mesh import RULES
from zjax.sharding.naming import name_of, names_of_dims, path_of
from zjax.sharding.placement import abstract_key
from zjax.typing import Logical, Model, Params

STACKED = ("layers", "experts")
VECTORS = ("bias", "scale")
_ONE_SIDE = ("heads", "head_dim"), ("kv_heads", "head_dim"), ("gates", "mlp")
"""Adjacent dims that count as one side of a matrix."""
Names = dict[str, Logical]
"""Dim names of parameters by path; a path is missing if no dim has a name."""


def named_params(model: Model, mesh: schema.Mesh) -> tuple[Params, Names]:
    """Traces a model's abstract parameters, and collects dim names by path."""
    params, _ = jax.eval_shape(model.init, abstract_key())
    paths = [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = zip(paths, names_of_dims(model, params, mesh), strict=True)
    return params, {path: dims for path, dims in names if any(dims)}


def used_axes(model: Model, settings: schema.Mesh) -> set[str]:
    """Mesh axes that may split a dim of a parameter, by the names of the dims."""
    _, names = named_params(model, settings)
    dims = {dim for logical in names.values() for dim in logical if dim}
    return {axis for dim in dims for axis in RULES.get(dim, ())}


def without_layers(names: Names) -> Names:
    """Drops the dim of stacked layers, for parameters stored layer by layer."""
    return {
        path: dims[1:] if dims[:1] == ("layers",) else dims
        for path, dims in names.items()
    }


def num_stacked(path: str, names: Names) -> int:
    """Counts leading dims that only stack parameters; 0 for a path without names."""
    count = 0
    for name in names.get(path, ()):
        if name not in STACKED:
            break
        count += 1
    return count


def is_matrix(path: str, num_dims: int, names: Names) -> bool:
    """Whether a parameter has two or more sides, and therefore decays.

    `heads` and `head_dim`, or `gates` and `mlp`, count as one side. A path that ends in
    `bias` or `scale` is a vector.
    """
    if name_of(path) in VECTORS:
        return False
    return len(_sides(path, num_dims, names)) >= 2


def muon_dims(
    path: str, num_dims: int, names: Names
) -> optax.contrib.MuonDimensionNumbers | None:
    """Splits the dims of a matrix that Muon orthogonalizes into input and output dims.

    None leaves a parameter to Adam: embeddings, the output matrix and parameters
    without exactly two sides, as `is_matrix` counts sides.

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
    """Groups the dims that do not stack parameters into sides of a matrix."""
    dims = names.get(path, (None,) * num_dims)
    sides: list[tuple[int, ...]] = []
    # The shape does not show the role: stacked norm scales have two dims, too.
    for dim in range(num_stacked(path, names), num_dims):
        if sides and dims[dim - 1 : dim + 1] in _ONE_SIDE:
            sides[-1] += (dim,)
        else:
            sides.append((dim,))
    return sides


def label_params(params: Any, groups: Groups) -> Any:
    """Labels every parameter of a tree with a group, by `label_of`."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: label_of(path_of(keys), groups), params
    )


def decay_of(group: schema.ParamGroup, default: float) -> float:
    """Returns the weight decay of a group, or `optimizer.weight_decay` as default."""
    # -1.0 in the settings stands for the default.
    return default if group.weight_decay < 0 else group.weight_decay


def check_groups(settings: schema.Optimizer, params: Any, names: Names) -> None:
    """Raises ConfigError that lists every group without an effect on this model.

    A group has no effect if no parameter matches, if earlier groups take all matching
    parameters, or if the decay meets no matrix. Freezing every parameter is refused
    too.
    """
    groups, leaves = settings.groups, jax.tree_util.tree_leaves_with_path(params)
    num_dims = {path_of(keys): len(leaf.shape) for keys, leaf in leaves}
    unassigned = set(num_dims)
    problems = []
    for index, group in enumerate(groups):
        matching = {path for path in num_dims if re.search(group.pattern, path)}
        # The first group that matches a parameter takes it.
        members = matching & unassigned
        unassigned -= members
        field = f"optimizer.groups[{index}]"
        if not members:
            problems.append(_no_match(field, group, list(num_dims), len(matching)))
        elif group.weight_decay > 0 and not any(
            settings.decay_vectors or is_matrix(path, num_dims[path], names)
            for path in members
        ):
            problem = "decays nothing, as no matrix is in the group"
            remedy = "leave it at -1.0, or set optimizer.decay_vectors"
            field, decay = f"{field}.weight_decay", group.weight_decay
            problems.append(Problem(field, decay, problem, remedy))
    if groups and all(label_of(path, groups) == FROZEN for path in num_dims):
        patterns = tuple(group.pattern for group in groups)
        problem = f"freezes all {len(num_dims)} parameters"
        remedy = "leave some to train"
        problems.append(Problem("optimizer.groups", patterns, problem, remedy))
    if problems:
        raise ConfigError(*problems)


def _no_match(
    field: str, group: schema.ParamGroup, paths: list[str], num_matching: int
) -> Problem:
    """Describes a pattern that selects no parameter, with similar paths as remedy."""
    if num_matching:
        problem = f"matches {num_matching} parameters, all taken by earlier groups"
        remedy = "move this group before them"
    else:
        problem = f"matches none of {len(paths)} parameters"
        # A cutoff of 0 lists paths even if none is similar.
        near = difflib.get_close_matches(group.pattern, paths, n=3, cutoff=0.0)
        remedy = f"paths look like {', '.join(near)}"
    return Problem(f"{field}.pattern", group.pattern, problem, remedy)
