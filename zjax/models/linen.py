"""Linen modules as submodels; the calls of the loss create the variables."""

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax.core import meta, tracers

from zjax.errors import ModelError, Problem
from zjax.models.submodel import Started, Submodel, names_of_boxes
from zjax.ops.keys import fold_name
from zjax.sharding.naming import path_of
from zjax.typing import ModelState, Params

FLAGS = {
    "deterministic": True,
    "use_running_average": True,
    "train": False,
    "training": False,
    "is_training": False,
}
"""Values of flags in evaluation. Flax defines the first two; the last three are
customary."""


def evaluation_mode() -> contextlib.AbstractContextManager[Any]:
    """Sets evaluation mode in all calls of Linen modules in the enclosed code.

    Example:
        >>> import jax
        >>> with evaluation_mode():
        ...     print(nn.Dropout(0.5, deterministic=False).apply({}, jax.numpy.ones(2)))
        [1. 1.]
    """
    return nn.intercept_methods(_call_in_evaluation)


def _call_in_evaluation(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
) -> Any:
    """Calls a method of a module with all flags of `FLAGS` set."""
    module = context.module
    for field in dataclasses.fields(module):
        # Only bools: a field of such a name may hold something else, as a schedule.
        if field.name in FLAGS and isinstance(getattr(module, field.name, None), bool):
            # Set it although modules are frozen: `module` is a copy for this call.
            object.__setattr__(module, field.name, FLAGS[field.name])
    try:
        bound = inspect.signature(context.orig_method).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself raises a better error
        return call(*args, **kwargs)
    for name, value in bound.arguments.items():
        if name in FLAGS and isinstance(value, bool):
            bound.arguments[name] = FLAGS[name]
    return call(*bound.args, **bound.kwargs)


SOWN = ("intermediates", "losses", "perturbations")
"""Collections that calls write for the loss to read, discarded after a step;
collections of tuples, as `Module.sow` makes, are discarded, too."""
Context = Callable[[], contextlib.AbstractContextManager[Any]]
NOUNS = {"params": "parameters", "variables": "collections"}
"""Contents of attributes of a view, for messages."""


class View:
    """Linen module with variables, called like the module.

    Args:
        model_state: Collections other than parameters, updated by calls in training.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Params,
        model_state: ModelState,
        key: jax.Array | None,
        context: Context = contextlib.nullcontext,
    ):
        self.module = module
        self.context = context
        self.params = params
        self.model_state = model_state
        self.train = key is not None
        """Whether this is a training step; for arguments such as `deterministic`."""
        self.sown: dict[str, Any] = {}
        """Values sown by the calls so far, by collection."""
        self._key = key
        self._num_calls = 0

    @property
    def variables(self) -> dict[str, Any]:
        """All collections by name, unboxed, as `Module.variables`."""
        return {"params": self.params, **self.model_state, **self.sown}

    def __call__(
        self, *args: Any, method: str | Callable[..., Any] | None = None, **kwargs: Any
    ) -> Any:
        """Runs the module, or the given method, on the current variables."""
        _check_arguments(kwargs)
        call = functools.partial(self._apply, args, kwargs, method)
        if self.train:
            # Parameters are frozen in training, too: only gradients change them.
            out, updates = call(self._key, ("params",))
        else:
            # In evaluation only sown collections are written.
            frozen = ("params", *self.model_state)
            with evaluation_mode():
                try:
                    out, updates = call(None, frozen)
                except flax.errors.InvalidRngError as error:
                    # A module that draws in evaluation gets a fixed key, rather than an
                    # error.
                    message = str(error).partition(" (http")[0]
                    logging.warning("evaluation draws the same each time: %s", message)
                    out, updates = call(jax.random.key(0), frozen)
        self._num_calls += 1
        for name, value in _unfreeze(updates).items():
            target = self.model_state if name in self.model_state else self.sown
            target[name] = value
        return out

    def _apply(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str | Callable[..., Any] | None,
        key: jax.Array | None,
        frozen: tuple[str, ...],
    ) -> Any:
        """Applies the module; all collections but the frozen may change."""
        with self.context():
            return self.module.apply(
                self.variables,
                *args,
                method=method,
                rngs={} if key is None else _streams(key, self._num_calls),
                mutable=flax.core.DenyList(frozen),
                **kwargs,
            )


class FirstView:
    """Linen module that creates variables when called."""

    train = True

    def __init__(
        self,
        module: nn.Module,
        initial: dict[str, Any],
        key: jax.Array,
        context: Context = contextlib.nullcontext,
    ):
        self.module = module
        self.context = context
        self.sown: dict[str, Any] = {}
        self._variables: dict[str, Any] = dict(initial)
        self._key = key
        self._trace = tracers.current_trace()  # to notice calls inside transformations
        self._calls: list[tuple[Any, ...]] = []

    @property
    def boxed_variables(self) -> dict[str, Any]:
        """Collections created so far, in Flax's boxes."""
        if self._calls and tracers.current_trace() == self._trace:
            for method, inputs in self._calls:
                args, kwargs = jax.tree.map(_zeros, inputs)
                self._add(self._init(method, args, kwargs)[1])
            self._calls.clear()  # each call is repeated once
        return self._variables

    @property
    def variables(self) -> dict[str, Any]:
        """Collections created and sown so far, by name."""
        created = {**self.model_state, **self.sown}
        if created or self.params:
            return {"params": self.params, **created}
        return self._refusing("variables")

    @property
    def params(self) -> Params:
        """Parameters created so far."""
        params = meta.unbox(self.boxed_variables.get("params", {}))
        return params or self._refusing("params")

    @property
    def model_state(self) -> ModelState:
        """Collections other than parameters created so far."""
        variables = self.boxed_variables
        return meta.unbox({k: v for k, v in variables.items() if k != "params"})

    def __call__(
        self, *args: Any, method: str | Callable[..., Any] | None = None, **kwargs: Any
    ) -> Any:
        """Runs the module, and creates missing variables."""
        _check_arguments(kwargs)
        out, created = self._init(method, args, kwargs)
        self.sown |= {k: x for k, x in created.items() if _is_sown(k, x)}
        if tracers.current_trace() == self._trace:
            self._add(created)
        else:
            # Variables made inside `jit` or `scan` cannot leave it: make them again.
            self._calls.append((method, jax.tree.map(_shape, (args, kwargs))))
        return out

    def _init(self, method: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Initialises all variables of a call; returns output and variables."""
        # The same key for every call, so that calls agree on shared variables.
        with self.context():
            out, created = self.module.init_with_output(
                _streams(self._key, 0), *args, method=method, mutable=True, **kwargs
            )
        return out, _unfreeze(created)

    def _add(self, created: dict[str, Any]) -> None:
        """Adds created variables; existing variables keep old values."""
        _check_shapes(self._variables, created)
        for name, value in created.items():
            if not _is_sown(name, value):
                old = self._variables.get(name, {})
                self._variables[name] = _merge(value, old)

    def _refusing(self, attribute: str) -> dict[str, Any]:
        """Makes an empty dict that raises, for attributes read before a call."""

        def refuse() -> Any:
            problem = f"is asked for {NOUNS[attribute]} that no call has created"
            remedy = f"call the model before its {attribute} are read in loss_fn"
            name = type(self.module).__name__
            raise ModelError(Problem(f"model.{attribute}", name, problem, remedy))

        # A `defaultdict`: reading a missing name raises, while `in` and loops work.
        return collections.defaultdict(refuse)


def make_submodel(
    module: nn.Module, context: Context = contextlib.nullcontext
) -> Submodel:
    """Makes a submodel of a Linen module; a bound module brings variables.

    Every collection but `params` and sown collections is model state.
    """
    variables: dict[str, Any] = {}
    is_bound = module.scope is not None
    if is_bound:
        module, bound = module.unbind()
        variables = _unfreeze(bound)
        variables = {k: x for k, x in variables.items() if not _is_sown(k, x)}

    def start(key: jax.Array) -> tuple[FirstView, Callable[[], Started]]:
        view = FirstView(module, variables, key, context)

        def started() -> Started:
            # Boxes hold the names of dims, which unboxing drops.
            names = names_of_boxes(view.boxed_variables.get("params", {}))
            return dict(view.params), view.model_state, names

        return view, started

    def resume(params: Params, model_state: ModelState, key: jax.Array | None) -> View:
        return View(module, params, dict(model_state), key, context)

    def model_state(view: Any) -> ModelState:
        return view.model_state

    def given() -> tuple[Params, ModelState]:
        unboxed = dict(meta.unbox(variables))
        return unboxed.pop("params", {}), unboxed

    return Submodel(
        start=start,
        resume=resume,
        model_state=model_state,
        needs_calls=True,
        given=given if is_bound else None,
    )


def _streams(key: Any, num_calls: int) -> dict[str, jax.Array]:
    """Makes the random streams of a call."""
    # Flax takes streams of other names from "params".
    key = jax.random.fold_in(key, num_calls)
    return {name: fold_name(key, name) for name in ("params", "dropout")}


def _is_sown(name: str, collection: Any) -> bool:
    """Whether a collection is sown, by name or by tuples among the leaves."""

    def is_tuple(x: Any) -> bool:
        return type(x) is tuple

    leaves = jax.tree.leaves(collection, is_leaf=is_tuple)
    return name in SOWN or any(map(is_tuple, leaves))


def _merge(new: Any, old: Any) -> Any:
    """Merges nested dicts; existing leaves win."""
    if not isinstance(new, Mapping) or not isinstance(old, Mapping):
        return old
    merged = {k: _merge(new[k], old[k]) for k in new.keys() & old.keys()}
    return {**new, **old, **merged}


def _unfreeze(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Converts collections to mutable dicts."""
    return flax.core.unfreeze(dict(variables))


def _check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuses arguments that the view passes to `module.apply`."""
    remedies = {
        "rngs": "leave it out: streams follow from the key of the step",
        "mutable": "leave it out: collections are updated in training, and what is "
        "sown is in model.sown",
    }
    problems = [
        Problem(f"model(..., {name})", "given", "is set by the view", remedy)
        for name, remedy in remedies.items()
        if name in kwargs
    ]
    if problems:
        raise ModelError(*problems)


def _shape(x: Any) -> Any:
    """Replaces an array by shape and dtype."""
    is_array = isinstance(x, jax.Array | np.ndarray)
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array else x


def _zeros(x: Any) -> Any:
    """Replaces shape and dtype by zeros, or by keys."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    # `jnp.zeros` makes no keys.
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), x.shape)
    return jnp.zeros(x.shape, x.dtype)


def _check_shapes(variables: Any, created: Any) -> None:
    """Refuses existing variables with other shapes than the model's."""
    old, new = _shapes(variables), _shapes(created)
    problems = [
        Problem(path, old[path], f"has the shape {shape} in the model", "give it that")
        for path, shape in new.items()
        if old.get(path, shape) != shape
    ]
    if problems:
        raise ModelError(*problems)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of variables by path."""
    leaves = jax.tree_util.tree_leaves_with_path(meta.unbox(tree))
    return {path_of(keys): jnp.shape(x) for keys, x in leaves}
