"""Builds the optax transformation of a config.

Each update rule chains a direction, weight decay and the learning rate. Gradient
clipping is not part of the transformation: the training step clips, and reports the
gradient norm before clipping.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import optax

from zjax.optim import groups, moments, onebit, transforms, zero_one_adam
from zjax.optim.onebit import make_adam_steps, scale_by_adam
from zjax.optim.per_layer import per_layer
from zjax.optim.precision import moment_dtype
from zjax.schedule import learning_rate
from zjax.schedule.learning_rate import make_schedule
from zjax.settings import schema
from zjax.settings.derived import is_offered, is_recipe
from zjax.settings.parameters import DEFAULT, FROZEN
from zjax.sharding.naming import path_of
from zjax.sharding.plan import stores_layers_apart
from zjax.typing import Model


def make_optimizer(
    config: schema.Config, model: Model | None = None
) -> optax.GradientTransformation:
    """Builds the optimizer of `config.optimizer`.

    Weight decay is decoupled (arXiv:1711.05101) and applies to matrices only, unless
    `decay_vectors` is on; `adam` and `sgd_l2` add the decay to the gradient, as
    torch.optim.SGD does. Muon leaves embeddings, the output matrix and vectors to Adam
    with Nesterov momentum, which has updates of a similar size (arXiv:2502.16982), so
    that one learning rate serves both. LAMB clips the trust ratio to 0.01 to 10.
    Adafactor factors most second moments.

    Args:
        config: Config; reads `num_steps`, `optimizer`, `precision.master_dtype` and,
            for the names of dims, `mesh`.
        model: Model; dim names tell matrices from stacked vectors. If None, arrays of
            two dims or more not called `bias` or `scale` are matrices, and groups are
            not checked.

    Returns:
        The transformation. Frozen parameters have no state.

    Raises:
        ConfigError: A parameter group has no effect.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = make_optimizer(schema.Config())
        >>> type(tx.init({"w": jnp.ones((2, 3))})[0]).__name__
        'ScaleByAdamState'

    Reference:
        AdamW arXiv:1711.05101, Adam arXiv:1412.6980, LAMB arXiv:1904.00962, Lion
        arXiv:2302.06675, Adafactor arXiv:1804.04235, Muon arXiv:2502.16982.
    """
    settings = config.optimizer
    names: groups.Names = {}
    if model is not None:
        params, names = groups.named_params(model, config.mesh)
        groups.check_groups(settings, params, names)
        if stores_layers_apart(config.zero, model):
            # The parameters of layers stored apart have no dim of layers, which the
            # model names.
            names = groups.without_layers(names)
    schedule = make_schedule(config)
    tx = _make_rules(settings, schedule, names)
    dtype = moment_dtype(settings.rule)
    # Adafactor's factored moments are small already.
    if not dtype or {dtype, config.precision.master_dtype} == {"float32"}:
        return tx
    return moments.store_moments(tx, dtype, names)


def with_clipping_as_set(given: schema.Optimizer) -> schema.Optimizer:
    """Clips only if `clip_norm` was set, for runs that bring an optimizer.

    Recipe values of a shipped config are reset to defaults: the record of the run must
    not name a learning rate that the run does not use.
    """
    changes = {"ema_decay": given.ema_decay}
    # A `clip_norm` that nobody set must not clip for the caller's optimizer.
    if is_offered(given.clip_norm) or is_recipe(given.clip_norm):
        changes["clip_norm"] = math.inf
    return dataclasses.replace(_without_recipe(given), **changes)


def _without_recipe(section: Any) -> Any:
    """Copies a section with the numbers of a shipped config reset to defaults."""
    changes = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _without_recipe(value)
        elif is_recipe(value):
            changes[field.name] = field.default
    return dataclasses.replace(section, **changes)


def _make_rules(
    settings: schema.Optimizer, schedule: Callable[..., Any], names: groups.Names
) -> optax.GradientTransformation:
    """Partitions parameters into groups, each with an update rule."""
    default = _make_rule(settings, schedule, settings.weight_decay, names)
    if not settings.groups:
        return default
    rules: dict[Hashable, optax.GradientTransformation] = {
        DEFAULT: default,
        FROZEN: optax.set_to_zero(),
    }
    for index, group in enumerate(settings.groups):
        # Groups with a scale of 0 are labelled FROZEN, for which a rule exists above.
        if group.learning_rate_scale:
            scaled = _scaled(schedule, group.learning_rate_scale)
            decay = groups.decay_of(group, settings.weight_decay)
            rule = _make_rule(settings, scaled, decay, names)
            rules[f"group_{index}"] = rule
    return optax.partition(
        rules, lambda params: groups.label_params(params, settings.groups)
    )


def _scaled(schedule: Callable[..., Any], factor: float) -> Callable[..., Any]:
    return lambda step: factor * schedule(step)


def _make_rule(
    settings: schema.Optimizer,
    schedule: Callable[..., Any],
    weight_decay: float,
    names: groups.Names,
) -> optax.GradientTransformation:
    """Chains direction, weight decay, trust ratio and learning rate of one group."""

    def decayed(params: Any) -> Any:
        if settings.decay_vectors:
            return jax.tree.map(lambda _: True, params)
        return _map_params(groups.is_matrix, params, names)

    def num_stacked(keys: Any) -> int:
        return groups.num_stacked(path_of(keys), names)

    def decay_of(params: Any) -> Any:
        return jax.tree.map(lambda d: weight_decay * d, decayed(params))

    rule = settings.rule
    if isinstance(rule, schema.ZeroOneAdam):
        # 0/1 Adam applies learning rate and decay itself: replicas step on their own.
        steps = make_adam_steps(rule)
        return zero_one_adam.zero_one_adam(schedule, steps, decay_of)
    decay = optax.add_decayed_weights(weight_decay, mask=decayed)
    parts = (_direction(settings, names), decay)
    # L2 regularisation: the decay enters the moments, so it precedes the direction.
    if isinstance(rule, schema.Adam | schema.SgdL2):
        parts = (decay, _direction(settings, names))
    # The trust ratio of LAMB covers the decayed update, so it follows the decay.
    if isinstance(rule, schema.Lamb):
        parts = (*parts, transforms.scale_by_layer(num_stacked))
    if isinstance(rule, schema.OnebitLamb):
        parts = (*parts, onebit.scale_by_kept_norm(num_stacked))
    return optax.chain(*parts, optax.scale_by_learning_rate(schedule))


def _direction(
    settings: schema.Optimizer, names: groups.Names
) -> optax.GradientTransformation:
    """Returns the direction of ascent, before decay and learning rate."""
    match settings.rule:
        case schema.StoredAdam() | schema.Lion() as rule:
            return _cycled(rule, settings.schedule)
        case schema.OnebitAdam() | schema.OnebitLamb() as rule:
            return onebit.scale_by_onebit_adam(make_adam_steps(rule))
        case schema.Sgd() | schema.SgdL2() as rule:
            # `optax.trace` would store a momentum even for a decay of 0.
            return optax.trace(decay=rule.b1) if rule.b1 else optax.identity()
        case schema.Muon() as rule:
            downhill = optax.contrib.muon(
                learning_rate=1.0,
                beta=rule.b1,
                eps=rule.eps,
                adam_b1=rule.b1,
                adam_b2=rule.b2,
                # The RMS of Adam's updates, so that one learning rate serves both.
                consistent_rms=0.2,
                muon_weight_dimension_numbers=lambda params: _map_params(
                    groups.muon_dims, params, names
                ),
            )
        case _:  # Adafactor
            downhill = per_layer(optax.adafactor(learning_rate=None), names)
    # Adafactor and Muon return descent directions; the rules above return ascent.
    return optax.chain(downhill, optax.scale(-1.0))


def _cycled(
    rule: schema.StoredAdam | schema.Lion, schedule: schema.Schedule
) -> optax.GradientTransformation:
    """Builds Adam or Lion, whose `b1` may follow the learning rate."""
    if isinstance(rule, schema.Lion):
        make = functools.partial(optax.scale_by_lion, b2=rule.b2)
    else:
        steps = make_adam_steps(rule)

        def make(b1: Any) -> optax.GradientTransformation:
            return scale_by_adam(dataclasses.replace(steps, b1=b1))

    # A cycled `b1` is traced: the rule is rebuilt from it in every step.
    if isinstance(schedule, schema.OneCycle) and schedule.momentum:
        momentum = learning_rate.cycled_momentum(schedule, schedule.momentum)
        return learning_rate.with_momentum(make, momentum)
    return make(b1=rule.b1)


def _map_params(
    rule: Callable[[str, int, groups.Names], Any],
    params: Any,
    names: groups.Names,
) -> Any:
    """Applies `rule(path, num_dims, names)` to every parameter of a tree."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: rule(path_of(keys), leaf.ndim, names), params
    )
