"""Adapts user models and losses to pure functions of params, state, batch and key."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from zjax.data.entries import entries_of
from zjax.errors import ModelError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.models import contract, linen, lora, nnx
from zjax.models import submodel as submodels
from zjax.ops.keys import fold_name, loss_key
from zjax.settings import schema
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key
from zjax.typing import Batch, Loss, Model, ModelState, Params

KINDS = (
    "a Linen module, an NNX module, a function `rngs -> nnx.Module`, a pair "
    "(init, apply) or (params, apply), or a dict of these"
)


def adapt(
    model: Any,
    loss_fn: Callable[..., Any],
    batch: Batch,
    *,
    replicated: Sequence[str] = (),
    cast: Sequence[str] | None = None,
    adapters: schema.Lora | None = None,
) -> Model:
    """Converts a model and its loss to the functions that training uses.

    The loss calls a view of the model:

    - Linen: the view is called like `module.apply`, without variables and `rngs`.
      `view.train` is False in evaluation, and `view.sown` holds values that calls have
      sown. Parameters are created by the calls of `loss_fn`; afterwards `view.params`
      holds them, and `view.variables` all collections, such as
      `view.variables["batch_stats"]`. `module.bind(variables)` starts from existing
      variables.
    - NNX: the view is the module, in training or evaluation mode. Values are sown under
      `nnx.capture`. Parameters that the loss writes are discarded.
    - Plain functions: the view is `partial(apply, params)`. A pair `(params, apply)`
      starts from existing parameters.
    - A dict of models: the view has one item, and attribute, per model.

    Args:
        model: Model in one of the forms above.
        loss_fn: Function `loss_fn(view, batch, key)` that returns the mean loss as a
            scalar, or `(loss, weight, metrics)`: the number of units behind the mean (1
            by default) and a dict of scalars. The key is None in evaluation; a loss
            that needs a key gets one derived from the batch.
        batch: Arrays or ShapeDtypeStructs, of which only shapes and dtypes are read.
            Later batches must have equal arrays, with any number of rows.
        replicated: Paths of arrays without rows, such as a table of class weights:
            every device and microbatch gets the whole arrays.
        cast: Paths of the floating-point arrays that are cast to the compute dtype.
            None selects arrays of two dims or more to which the model applies
            parameters, see `zjax.models.contract`.
        adapters: Settings of adapters in the linear layers of Flax modules; None adds
            no adapter.

    Returns:
        Model with trees of nested dicts for Flax modules, or the trees that `init`
        returns for plain functions; `given` is set if all weights exist already.

    Raises:
        DataError: The batch is not a tree of numeric arrays with equal numbers of rows,
            or lacks a named array.
        ConfigError: A pattern of the adapters matches no layer, or a layer that
            overrides the call of a Flax layer.
        ModelError: The model is of unknown kind, has no parameters or parameters that
            are not floating-point, or the loss returns something else.

    Example:
        >>> def loss_fn(model, batch, key):
        ...     return jnp.mean(model(batch) ** 2)
        >>> model = adapt((lambda key: jnp.ones(2), jnp.multiply), loss_fn, jnp.ones(2))
        >>> params, model_state = model.init(jax.random.key(0))
        >>> float(model.loss(params, model_state, jnp.full(2, 3.0), None).value)
        9.0
    """
    entries = entries_of(batch, replicated=replicated)
    # zjax needs the standard rules; user code gets the rules that the user has set.
    promotion = jax.numpy_dtype_promotion.value

    @contextlib.contextmanager
    def user_code() -> Iterator[None]:
        with submodels.names_only(), dtype_promotion(promotion):
            yield

    with user_code():
        submodel = _make_submodel(model, "model", adapters)
    example = jax.eval_shape(lambda batch: batch, batch)

    @user_code()
    def start(key: jax.Array) -> submodels.Started:
        view, started = submodel.start(fold_name(key, "model"))
        # Linen creates variables in calls: the loss runs once, on zeros.
        if submodel.needs_calls:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), example)
            contract.call_loss(loss_fn, view, zeros, loss_key(key))
        params, model_state, logical = started()
        contract.check_params(model, params)
        return (
            contract.without_weak_types(params),
            contract.without_weak_types(model_state),
            logical,
        )

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        return start(key)[:2]

    @user_code()
    def loss(
        params: Params, model_state: ModelState, batch: Batch, key: jax.Array | None
    ) -> Loss:
        if key is None:
            # Each attempt of an evaluation gets a new view, as a failed one may be
            # changed.
            view = functools.partial(submodel.resume, params, model_state, None)
            value, weight, metrics = contract.evaluate_loss(loss_fn, view, batch)
            return Loss(value, weight, model_state, metrics)
        view = submodel.resume(params, model_state, fold_name(key, "model"))
        value, weight, metrics = contract.call_loss(loss_fn, view, batch, loss_key(key))
        after = contract.without_weak_types(submodel.model_state(view))
        contract.check_model_state(model_state, after)
        return Loss(value, weight, after, metrics)

    def bind(params: Params, model_state: ModelState) -> Any:
        return submodel.resume(params, model_state, None)

    shapes, logical = _trace(start)
    if adapters is not None:
        leaves = jax.tree_util.tree_leaves_with_path(shapes[0])
        arrays = [(path_of(keys), x) for keys, x in leaves]
        lora.check_targets((path for path, _ in arrays), adapters)
        lora.warn_of_matrices_without_adapter(arrays, adapters)
    given = submodel.given
    if given and submodel.needs_calls:
        # A bound Linen module may lack variables that the loss creates.
        is_complete = jax.tree.structure(given()) == jax.tree.structure(shapes)
        given = given if is_complete else None
    adapted = Model(
        init=init,
        loss=loss,
        bind=bind,
        logical=lambda params: logical,
        given=given,
        inputs=example,
        entries=entries,
    )
    return contract.with_cast(adapted, example, cast)


def adapt_optimizer(tx: Any, user_model: Any, model: Model) -> Any:
    """Makes an optimizer for the `nnx.State` of `user_model` work on nested dicts."""
    is_function = callable(user_model) and _init_and_apply(user_model)[1] is None
    if isinstance(user_model, flax_nnx.Module) or is_function:
        params, _ = jax.eval_shape(model.init, abstract_key())
        return nnx.accept_states(tx, user_model, params)
    return tx


def _make_submodel(
    model: Any, field: str, adapters: schema.Lora | None = None, prefix: str = ""
) -> submodels.Submodel:
    """Makes the submodel of a model of any kind; `field` names it in messages."""
    if isinstance(model, dict) and model and all(isinstance(n, str) for n in model):
        return submodels.combine(
            {
                n: _make_submodel(
                    m, f"{field}.{n}", adapters, f"{prefix}/{n}".strip("/")
                )
                for n, m in model.items()
            }
        )
    context, change = contextlib.nullcontext, None
    if adapters is not None:
        how = {"settings": adapters, "prefix": prefix}
        context = functools.partial(lora.linen_adapters, **how)
        change = functools.partial(lora.attach, **how)
    if isinstance(model, flax.linen.Module):
        return linen.make_submodel(model, context)
    if isinstance(model, type) and issubclass(model, flax.linen.Module):
        # A class is callable, too, and would count as a factory of NNX modules.
        text, remedy = "is a Linen class, not a module", f"pass {model.__name__}(...)"
        raise ModelError(Problem(field, model.__name__, text, remedy))
    if isinstance(model, flax_nnx.Module):
        return nnx.make_submodel(model, field, change)
    init, apply = _init_and_apply(model)
    if init is not None and callable(apply):
        return submodels.submodel_of_functions(init, apply)
    if callable(model):
        return nnx.make_submodel(model, field, change)
    text, remedy = "is not a model", f"use {KINDS}"
    raise ModelError(Problem(field, type(model).__name__, text, remedy))


def _init_and_apply(model: Any) -> tuple[Any, Any]:
    """Returns the pair of functions of a plain model; None for each that is missing."""
    if isinstance(model, tuple) and len(model) == 2:
        return model
    return getattr(model, "init", None), getattr(model, "apply", None)


def _trace(start: Callable[[jax.Array], submodels.Started]) -> tuple[Any, Any]:
    """Traces `start` to abstract parameters and model state, and names of dims."""
    # Names are not arrays, so they leave the trace as a side effect.
    names: list[Any] = []

    def trace(key: jax.Array) -> tuple[Params, ModelState]:
        params, model_state, logical = start(key)
        names.append(logical)
        return params, model_state

    return jax.eval_shape(trace, abstract_key()), names[0]
