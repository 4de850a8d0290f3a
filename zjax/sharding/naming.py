"""What the dims of each parameter are: by the model, or by rules of a config."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from zjax.config import schema
from zjax.errors import PlanError, Problem
from zjax.sharding.placement import path_of
from zjax.sharding.rules import RULES, STACKED_DIMS
from zjax.typing import Logical, Model, Params


def names_of_dims(
    model: Model, params: Params, rules: Sequence[schema.DimRule] = ()
) -> list[Logical]:
    """Names the dims of each parameter.

    Args:
        model: Says what it knows of them.
        params: Parameters, abstract or not.
        rules: `mesh.rules`; the first whose pattern is found in a path wins over the
            model. The dim of stacked layers keeps its name.

    Returns:
        One name or None per dim, in the order of the leaves.

    Raises:
        PlanError: Rules that match nothing, name more dims than there are, or names
            that have no rule of placement; all of them at once.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    known = tree.flatten_up_to(model.logical(params))
    paths = [path_of(keys) for keys, _ in leaves]
    owners = {path: _first_match(path, rules) for path in paths}
    problems = [
        problem
        for index, rule in enumerate(rules)
        for problem in _useless(f"mesh.rules[{index}]", index, rule, owners)
    ]
    found: list[Logical] = []
    for path, (_, leaf), names in zip(paths, leaves, known, strict=True):
        names = (None,) * leaf.ndim if names is None else names
        owner = owners[path]
        if owner is not None:
            num_stacked = sum(name in STACKED_DIMS for name in names)
            dims = rules[owner].dims
            names = (*names[:num_stacked], *(name or None for name in dims))
            if len(names) > leaf.ndim:
                problem = f"names {len(dims)} dims, and {path} has "
                problem += f"{leaf.ndim - num_stacked}"
                remedy = "name each dim once, from the first on"
                field = f"mesh.rules[{owner}].dims"
                problems.append(Problem(field, dims, problem, remedy))
            names = (*names, *[None] * (leaf.ndim - len(names)))
        found.append(names)
    if problems:
        raise PlanError(*problems)
    return found


def _first_match(path: str, rules: Sequence[schema.DimRule]) -> int | None:
    matches = (i for i, rule in enumerate(rules) if re.search(rule.pattern, path))
    return next(matches, None)


def _useless(
    field: str, index: int, rule: schema.DimRule, owners: dict[str, Any]
) -> Iterator[Problem]:
    """Problems of a rule whatever the parameters that it matches."""
    for name in rule.dims:
        if name and name not in RULES:
            remedy = f"use one of {', '.join(RULES)}, or ''"
            problem = f"has no rule for {name}"
            yield Problem(f"{field}.dims", rule.dims, problem, remedy)
    if index in owners.values():
        return
    taken = [path for path in owners if re.search(rule.pattern, path)]
    if taken:
        problem = f"matches {len(taken)} parameters, all taken by earlier rules"
        remedy = "move this rule before them"
    else:
        problem = f"matches none of {len(owners)} parameters"
        near = difflib.get_close_matches(rule.pattern, list(owners), n=3, cutoff=0.0)
        remedy = f"paths look like {', '.join(near)}"
    yield Problem(f"{field}.pattern", rule.pattern, problem, remedy)
