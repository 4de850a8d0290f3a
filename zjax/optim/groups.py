"""Parameter groups: learning rates and weight decays by parameter path."""

import difflib
import re
from typing import Any

import jax

from zjax.config import schema
from zjax.config.groups import FROZEN, Groups, label_of
from zjax.errors import ConfigError, Problem
from zjax.optim.matrices import Names, is_matrix
from zjax.sharding.paths import path_of


def label_params(params: Any, groups: Groups) -> Any:
    """Tree of the groups of all parameters, as `label_of`.

    Example:
        >>> frozen = schema.ParamGroup(pattern="a", learning_rate_scale=0.0)
        >>> label_params({"a": 1.0, "b": 2.0}, (frozen,))
        {'a': 'frozen', 'b': 'default'}
    """
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: label_of(path_of(keys), groups), params
    )


def decay_of(group: schema.ParamGroup, default: float) -> float:
    """Returns the weight decay of a group, else `optimizer.weight_decay`.

    Example:
        >>> decay_of(schema.ParamGroup(), 0.1)
        0.1
        >>> decay_of(schema.ParamGroup(weight_decay=0.0), 0.1)
        0.0
    """
    return default if group.weight_decay < 0 else group.weight_decay


def check_groups(settings: schema.Optimizer, params: Any, names: Names) -> None:
    """Refuses groups that have no effect on this model.

    Args:
        settings: Reads `groups` and `decay_vectors`.
        params: Parameters of the model, or their shapes.
        names: Dim names of parameters by path, where known.

    Raises:
        ConfigError: A pattern matches no parameter, or only those of earlier groups; a
            decay has no matrix; every parameter is frozen. Reports all problems at
            once.
    """
    groups, leaves = settings.groups, jax.tree_util.tree_leaves_with_path(params)
    num_dims = {path_of(keys): len(leaf.shape) for keys, leaf in leaves}
    unassigned = set(num_dims)
    problems = []
    for index, group in enumerate(groups):
        matching = {path for path in num_dims if re.search(group.pattern, path)}
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
    if num_matching:
        problem = f"matches {num_matching} parameters, all taken by earlier groups"
        remedy = "move this group before them"
    else:
        problem = f"matches none of {len(paths)} parameters"
        near = difflib.get_close_matches(group.pattern, paths, n=3, cutoff=0.0)
        remedy = f"paths look like {', '.join(near)}"
    return Problem(f"{field}.pattern", group.pattern, problem, remedy)
