"""Key paths of arrays, and logical names of the dims of parameters and adapters."""

import difflib
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import AbstractMesh, Mesh

from zjax.errors import PlanError, Problem
from zjax.settings import schema
from zjax.settings.parameters import is_adapter
from zjax.sharding import mesh as meshes
from zjax.sharding.mesh import RULES, STACKED_DIMS
from zjax.typing import Logical, Model, Params


class LayerKey(jax.tree_util.DictKey):
    """Key of one layer of `Layers`.

    A `LayerKey` equals the key of the stacked array, so that rules that match names
    find the layer. The key adds nothing to a path: a layer has the path of the stack.
    """

    def __init__(self, name: str, layer: int):
        super().__init__(name)
        self.layer = layer


def path_of(keys: Any) -> str:
    """Formats a key path of `jax.tree_util` as text with `/` between the parts."""
    keys = tuple(key for key in keys if not isinstance(key, LayerKey))
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def layer_of(keys: Any) -> int | None:
    """Index of the layer in a key path; None without a `LayerKey`.

    Example:
        >>> layer_of((jax.tree_util.DictKey("blocks"), LayerKey("kernel", 3)))
        3
    """
    numbers = (key.layer for key in keys if isinstance(key, LayerKey))
    return next(numbers, None)


def name_of(path: str) -> str:
    """Last part of a path, which is the name of an array.

    Example:
        >>> name_of("blocks/mlp/bias")
        'bias'
    """
    return path.rsplit("/", 1)[-1]


def owners(keys: Any, params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the parameters that a leaf of optimizer state may belong to.

    `params` holds any value per path. The path of the leaf contains the path of each
    owner: paths that end last come first, longer paths before shorter paths.

    Example:
        >>> keys = map(jax.tree_util.DictKey, ("mu", "blocks", "kernel"))
        >>> list(owners(tuple(keys), {"kernel": 1, "blocks/kernel": 2, "bias": 3}))
        [2, 1]
    """
    names = [path_of((key,)) for key in keys]
    # State nests the tree of parameters under names such as `mu`: paths end alike.
    for end in range(len(names), -1, -1):
        for start in range(end + 1):
            path = "/".join(names[start:end])
            if path in params:
                yield params[path]


def position_finder(params: Any) -> Callable[[Any], int | None]:
    """Makes a function from the key path of optimizer state to the parameter's index.

    Example:
        >>> position = position_finder({"bias": 0, "kernel": 0})
        >>> position((jax.tree_util.DictKey("mu"), jax.tree_util.DictKey("kernel")))
        1
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [(path_of(keys), layer_of(keys)) for keys, _ in leaves]
    positions = {name: i for i, name in enumerate(names)}
    # `owners` yields values, and here needs paths, which the layers of a stack share.
    paths = {path: path for path, _ in names}

    def position(keys: Any) -> int | None:
        keys_of_owners = ((path, layer_of(keys)) for path in owners(keys, paths))
        return next((positions[x] for x in keys_of_owners if x in positions), None)

    return position


def kernels_of_adapters(paths: Collection[str]) -> dict[str, str]:
    """Maps the path of each adapter matrix to the path of the kernel it adapts.

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
    """Names the dims of adapter matrices, by path, after the dims of the kernels.

    `kernels` comes from `kernels_of_adapters`; `names` has the names of all parameters.

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
        # `a` is [*stack, *inputs, rank], `b` is [*stack, rank, *outputs].
        by_matrix = {
            "a": (*before, None),
            "b": (*stack, None, *outputs),
            "magnitude": (*stack, *outputs),
        }
        return by_matrix[path.rsplit("/", 1)[-1]]

    return {path: one(path) for path in kernels}


def _layer(path: str) -> str:
    """Path of the layer of an adapter, with a slash at the end."""
    return path.rpartition("lora/")[0]


SPLITTING_AXES = (meshes.PIPELINE, meshes.EXPERT, meshes.TENSOR)
"""Axes that shard parameters by the names of their dims."""


def names_of_dims(
    model: Model,
    params: Params,
    settings: schema.Mesh,
    mesh: Mesh | AbstractMesh | None = None,
) -> list[Logical]:
    """Names the dims of each parameter by the model, `mesh.names` and `mesh.rules`.

    Each name is a key of `rules.RULES` or None; parameters are in the order of the
    leaves. Without a mesh, names that have no rule are not refused. All problems raise
    at once.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    logical_dims = [tuple(x or ()) for x in tree.flatten_up_to(model.logical(params))]
    paths = [path_of(keys) for keys, _ in leaves]
    table = dict(settings.names)
    kernels = kernels_of_adapters(paths)
    owners = {
        path: _first_match(path, settings.rules)
        for path in paths
        if path not in kernels
    }
    problems = list(_table_problems(table, logical_dims))
    for index, rule in enumerate(settings.rules):
        problems += _useless(f"mesh.rules[{index}]", index, rule, owners)
    names_by_leaf: list[Logical] = []
    misfits: dict[str, Problem] = {}
    for path, (_, leaf), dims in zip(paths, leaves, logical_dims, strict=True):
        said = [_translate(dim, table) for dim in dims]
        names = tuple(x[0] if len(x) == 1 and x[0] in RULES else None for x in said)
        # Models may name fewer dims than an array has; `_misfits` refuses more.
        names = (*names, *[None] * leaf.ndim)[: leaf.ndim]
        owner = owners.get(path)
        if owner is None:
            for word, problem in _misfits(path, dims, said, leaf.ndim, table):
                # One problem per unknown word, however many parameters use it.
                misfits.setdefault(word, problem)
        else:
            names, misfit = _by_rule(owner, settings.rules[owner], names, path)
            problems += misfit
        names_by_leaf.append(names)
    # Two arrays may have one path, which is refused where a checkpoint needs it.
    named = list(zip(paths, names_by_leaf, strict=True))
    adapters = name_adapters(kernels, dict(named))
    names_by_leaf = [adapters.get(path, names) for path, names in named]
    # Elsewhere an unknown name changes no sharding, and is only logged.
    if mesh is not None and any(mesh.shape[axis] > 1 for axis in SPLITTING_AXES):
        problems += misfits.values()
    if problems:
        raise PlanError(*problems)
    if mesh is not None and misfits:
        _log_unused(", ".join(misfits))
    return names_by_leaf


def _translate(dim: Any, table: dict[str, str]) -> tuple[str, ...]:
    """Translates the names that a model gives one dim; Flax allows several."""
    several = dim if isinstance(dim, tuple | list) else (dim,)
    names = (table.get(name, name) for name in several if isinstance(name, str))
    return tuple(name for name in names if name)


def _misfits(
    path: str,
    dims: tuple[Any, ...],
    said: list[tuple[str, ...]],
    rank: int,
    table: dict[str, str],
) -> Iterator[tuple[str, Problem]]:
    """Yields, by word, the problems of the names that a model gives one parameter."""
    if len(dims) > rank:
        problem = f"has more names than the {rank} dims"
        yield path, Problem(path, dims, problem, "use one name per dim, or mesh.rules")
        return
    for name in (name for names in said for name in names if name not in RULES):
        problem = f"does not say what {name} is, in {path}={dims!r}"
        remedy = f"give it a name of zjax, as in {{{name!r}: 'tensor'}}: one of "
        remedy += f"{', '.join(RULES)}, or '' for a dim that is not split"
        yield name, Problem("mesh.names", table, problem, remedy)
    for names in said:
        if len(names) > 1 and set(names) <= set(RULES):
            problem = f"names one dim {' and '.join(names)}"
            remedy = "leave one of them, with '' for the other in mesh.names"
            yield path, Problem(path, dims, problem, remedy)


# A run makes several plans; the cache logs each text once.
@functools.cache
def _log_unused(names: str) -> None:
    """Logs names that split nothing."""
    logging.warning("names of dims that split nothing on this mesh: %s", names)


def _table_problems(
    table: dict[str, str], logical_dims: Sequence[tuple[Any, ...]]
) -> Iterator[Problem]:
    """Yields the problems of `mesh.names`: meanings or names that are unknown."""
    used = {
        name: None for dims in logical_dims for x in dims for name in _translate(x, {})
    }
    for name, meaning in table.items():
        field = f"mesh.names[{name!r}]"
        if meaning and meaning not in RULES:
            remedy = f"use one of {', '.join(RULES)}, or ''"
            yield Problem(field, meaning, f"has no rule for {meaning}", remedy)
        if name not in used:
            remedy = f"remove it; the model names {', '.join(used) or 'nothing'}"
            yield Problem(field, meaning, "translates no name of the model", remedy)


def _first_match(path: str, rules: Sequence[schema.DimRule]) -> int | None:
    """Index of the first rule that matches a path."""
    matches = (i for i, rule in enumerate(rules) if re.search(rule.pattern, path))
    return next(matches, None)


def _by_rule(
    index: int, rule: schema.DimRule, names: Logical, path: str
) -> tuple[Logical, list[Problem]]:
    """Names the dims by a rule of the config; the dim of stacked layers stays named."""
    rank = len(names)
    stacked = names[: sum(name in STACKED_DIMS for name in names)]
    ruled = (*stacked, *(name or None for name in rule.dims))
    if len(ruled) <= rank:
        return (*ruled, *[None] * (rank - len(ruled))), []
    problem = f"names {len(rule.dims)} dims, and {path} has {rank - len(stacked)}"
    remedy = "name each dim once, from the first on"
    return names, [Problem(f"mesh.rules[{index}].dims", rule.dims, problem, remedy)]


def _useless(
    field: str, index: int, rule: schema.DimRule, owners: dict[str, Any]
) -> Iterator[Problem]:
    """Yields the problems of a rule itself: unknown names, or no parameter to match."""
    for name in rule.dims:
        if name and name not in RULES:
            remedy = f"use one of {', '.join(RULES)}, or ''"
            problem = f"has no rule for {name}"
            yield Problem(f"{field}.dims", rule.dims, problem, remedy)
    if index in owners.values():
        return
    matches = [path for path in owners if re.search(rule.pattern, path)]
    if matches:
        problem = f"matches {len(matches)} parameters, all taken by earlier rules"
        remedy = "move this rule before them"
    else:
        problem = f"matches none of {len(owners)} parameters"
        # Without a cutoff, as an example of a path always helps.
        near = difflib.get_close_matches(rule.pattern, list(owners), n=3, cutoff=0.0)
        remedy = f"paths look like {', '.join(near)}"
    yield Problem(f"{field}.pattern", rule.pattern, problem, remedy)
