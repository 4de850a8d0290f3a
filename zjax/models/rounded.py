"""Models whose forward pass rounds matrices to codes: quantisation-aware training.

Matrices are rounded in the compute dtype, whole, in each pass, and gradients pass the
rounding unchanged (Jacob et al., arXiv:1712.05877). Beside adapters the frozen matrices
are rounded and the adapters are not, as in the QAT of torchao with LoRA.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta

from zjax.config.quantize_rules import unused_rule_problems
from zjax.errors import ConfigError, Problem
from zjax.models import layers
from zjax.models.mixture import Matrix
from zjax.ops.rounding import group_size, rounded_kernel
from zjax.settings.parameters import is_adapter
from zjax.settings.quantize import Quantize, Rule
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key
from zjax.typing import Model, Params

KERNEL = "kernel"


def attach(module: nnx.Module, settings: Quantize) -> None:
    """Gives the linear layers of a built-in model the first rule that matches each.

    Experts are layers, too, such as `blocks/mlp/experts/up`.
    """
    found = linear_layers(module)
    check_patterns(found, settings)
    check_groups(num_inputs_of(found), settings)
    for path, layer in found.items():
        rule = settings.rule_of(path)
        is_read = rule and (rule.weights, rule.activations) != ("compute", "compute")
        layer.rounding = rule if is_read else None
        if rule and rule.activations != "compute" and isinstance(layer, Matrix):
            problem = f"rounds no tokens of experts, such as {path}"
            remedy = "use 'compute' in a rule before, with pattern='experts'"
            field = f"quantize.rules[{settings.rules.index(rule)}].activations"
            raise ConfigError(Problem(field, rule.activations, problem, remedy))


def linear_layers(module: nnx.Module) -> dict[str, Any]:
    """Returns the linear layers of a built-in model, experts included, by path."""
    return {
        "/".join(map(str, parts)): layer
        for parts, layer in nnx.iter_modules(module)
        if isinstance(layer, layers.Linear | Matrix)
    }


def rounded_layers(module: nnx.Module) -> dict[str, Any]:
    """Returns the layers with rounded matrices of a module, by path."""
    return {
        "/".join(map(str, parts)): layer
        for parts, layer in [*nnx.iter_modules(module)]
        if getattr(layer, "rounding", None) is not None
    }


def check_patterns(paths: Collection[str], settings: Quantize) -> None:
    """Refuses rules that are the first to match for no linear layer."""
    if problems := [*unused_rule_problems("quantize.rules", settings.rules, paths)]:
        raise ConfigError(*problems)


def num_inputs_of(found: Mapping[str, Any]) -> dict[str, int]:
    """Counts the inputs of the matrices of built-in layers, by path."""

    def count(layer: Any) -> int:
        kernel = layer.kernel
        last = len(kernel.shape) - layer.num_outputs
        return math.prod(kernel.shape[last - layer.num_inputs : last])

    return {path: count(layer) for path, layer in found.items()}


def check_groups(depths: Mapping[str, int], settings: Quantize) -> None:
    """Refuses sizes of groups that let no inputs of some layer share a scale."""
    if problems := [*group_problems("quantize.rules", settings.rules, depths)]:
        raise ConfigError(*problems)


def group_problems(
    field: str, rules: tuple[Rule, ...], depths: Mapping[str, int]
) -> Iterator[Problem]:
    """Yields sizes of groups that let no inputs of some layer share a scale.

    Args:
        field: Name of the rules in messages.
        rules: Rules, of which the first that matches decides.
        depths: Inputs of the linear layers by path.
    """
    settings = Quantize(rules=rules)
    for number, rule in enumerate(rules):
        own = {p: n for p, n in depths.items() if settings.rule_of(p) is rule}
        name, weights = f"{field}[{number}]", rule.weights
        if weights == "mxfp4" and (
            odd := [n for n in own.values() if n % Rule.MX_GROUP]
        ):
            problem = f"needs inputs that {Rule.MX_GROUP} divides, not {odd[0]}"
            yield Problem(f"{name}.weights", "mxfp4", problem, "use 'int4'")
        single = [p for p, n in own.items() if group_size(n, rule.group_size) == 1 < n]
        if single and weights not in ("compute", "mxfp4"):
            depth = own[single[0]]
            problem = f"lets none of the {depth} inputs of {single[0]} share a scale"
            remedy = f"use {depth}, or 0 for one scale of all inputs"
            yield Problem(f"{name}.group_size", rule.group_size, problem, remedy)


def round_params(model: Model, settings: Quantize) -> Model:
    """Makes a model read rounded parameters, whatever library wrote the model.

    Matrices are parameters of two dims or more whose path matches a rule, `/kernel` at
    the end left out; paths that end in `embedding` are tables and stay as they are. The
    last dim is the outputs and all others are inputs; a first dim of the logical name
    `layers` or `experts` is a stack of matrices. Gradients pass the rounding unchanged.

    Args:
        model: Model as pure functions.
        settings: Rules without activations.

    Returns:
        Model with equal parameters, whose loss and modules read rounded parameters.
        Without a stack of blocks: pipelines and offloaded blocks refuse the model.

    Raises:
        ConfigError: A rule matches no matrix, or rounds activations.

    Example:
        >>> import jax.numpy as jnp, zjax
        >>> from zjax.settings.quantize import Quantize
        >>> init = lambda key: {"w": jnp.ones((16, 1))}
        >>> apply = lambda params, x: x @ params["w"]
        >>> loss = lambda model, batch, key: jnp.mean(model(batch) ** 2)
        >>> model = zjax.adapt((init, apply), loss, jnp.ones((2, 16)))
        >>> bool(round_params(model, Quantize()).bind is model.bind)
        False

    Reference:
        Jacob et al. (arXiv:1712.05877).
    """
    _check_activations(settings)
    params, _ = jax.eval_shape(model.init, abstract_key())
    stacked = _num_stacked(model, params)
    check_patterns(stacked, settings)
    check_groups(_depths(params, stacked), settings)

    def one(path: str, x: Any) -> Any:
        layer = _layer_of(path)
        rule = settings.rule_of(layer) if layer in stacked else None
        return x if rule is None else rounded_kernel(x, rule, 1, stacked[layer])

    def rounded(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(lambda k, x: one(path_of(k), x), params)

    return dataclasses.replace(
        model,
        # A stack and layers taken apart would read the parameters past the rounding.
        stack=None,
        takes_layers_apart=False,
        loss=ReadsRounded(model.loss, rounded),
        bind=ReadsRounded(model.bind, rounded),
    )


@dataclasses.dataclass(frozen=True)
class ReadsRounded:
    """Function of parameters that a change, such as rounding, reaches first."""

    function: Callable[..., Any]
    change: Callable[[Params], Params]

    def __call__(self, params: Params, *others: Any) -> Any:
        """Calls the function with changed parameters."""
        return self.function(self.change(params), *others)


def check_rounding(settings: Quantize, model: Model) -> None:
    """Refuses rules beside a model that reads matrices as they are."""
    if isinstance(model.bind, ReadsRounded):
        return
    if model.stack is not None:
        params, state = jax.eval_shape(model.init, abstract_key())
        module = model.bind(params, state)
        if isinstance(module, nnx.Module) and rounded_layers(module):
            return
    problem = "rounds nothing of a zjax.Model, whose functions are given"
    remedy = "use zjax.models.rounded.round_params, or leave quantize out"
    raise ConfigError(Problem("quantize.rules", [*settings.rules], problem, remedy))


def _check_activations(settings: Quantize) -> None:
    """Refuses rules for activations, which only built-in layers read."""
    problems = [
        Problem(
            f"quantize.rules[{number}].activations",
            rule.activations,
            "rounds what enters layers of the built-in models alone",
            "use 'compute'",
        )
        for number, rule in enumerate(settings.rules)
        if rule.activations != "compute"
    ]
    if problems:
        raise ConfigError(*problems)


def _depths(params: Params, stacked: Mapping[str, int]) -> dict[str, int]:
    """Counts the inputs of the matrices of a model, by layer."""
    named = jax.tree_util.tree_leaves_with_path(meta.unbox(params))
    found = {_layer_of(path_of(keys)): x.shape for keys, x in named}
    return {path: math.prod(found[path][n:-1]) for path, n in stacked.items()}


def _layer_of(path: str) -> str:
    """Returns the path of a layer by the path of the matrix."""
    return path.removesuffix(f"/{KERNEL}")


def _num_stacked(model: Model, params: Params) -> dict[str, int]:
    """Returns the number of stacked dims of each matrix of a model, by layer."""
    params = meta.unbox(params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = model.logical(params)
    found = {}
    for keys, x in leaves:
        path = path_of(keys)
        is_table = path.endswith("embedding")  # multiplies nothing
        is_number = jnp.issubdtype(x.dtype, jnp.floating)
        if is_adapter(path) or is_table or not is_number:
            continue
        logical = names
        for key in keys:
            logical = None if logical is None else _entry(logical, key)
        first = logical[0] if isinstance(logical, tuple) and logical else None
        depth = int(first in ("layers", "experts"))
        if x.ndim - depth >= 2:
            found[_layer_of(path)] = depth
    return found


def _entry(tree: Any, key: Any) -> Any:
    """Returns the entry of a tree at a key of a path; None for a missing one."""
    name = getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))
    if isinstance(tree, dict):
        return tree.get(name)
    if isinstance(tree, list | tuple) and isinstance(name, int):
        return tree[name] if name < len(tree) else None
    return getattr(tree, str(name), None)
