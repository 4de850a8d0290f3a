"""Contract of one model of a loss, from any library, and of dicts of models."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import NamedSharding

from zjax.ops.keys import fold_name
from zjax.typing import ModelState, Params

# A context variable: other threads may build models at this moment.
_only_read = contextvars.ContextVar("only_read", default=False)


@contextlib.contextmanager
def names_only() -> Iterator[None]:
    """Keeps Flax from applying sharding metadata while user code runs."""
    token = _only_read.set(True)
    try:
        with nnx.use_eager_sharding(False):
            yield
    finally:
        _only_read.reset(token)


def _as_names(unbox: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `unbox` of a box, which applies no constraint inside `names_only`."""

    @functools.wraps(unbox)
    def read(self: Any, apply_constraint: bool = True) -> Any:
        return unbox(self, apply_constraint and not _only_read.get())

    return read


# Linen has no switch for this. Outside `names_only` nothing changes.
for _box in (nn.Partitioned, nn.LogicallyPartitioned):
    _box.unbox = _as_names(_box.unbox)


def is_box(x: Any) -> bool:
    """Whether a value is an array boxed with metadata."""
    return isinstance(x, nn.meta.AxisMetadata)


def names_of_boxes(tree: Any, *, boxed: bool = False) -> Any:
    """Returns names of dims of Linen arrays: a tuple per named box, None elsewhere."""

    def names(x: Any) -> Any:
        dim_names = tuple(x.names) if isinstance(x, nn.Partitioned) else None
        return x.replace_boxed(dim_names) if boxed and is_box(x) else dim_names

    return jax.tree.map(names, tree, is_leaf=is_box)


def names_of_sharding(sharding: Any) -> tuple[Any, ...]:
    """Returns names of dims in the sharding of an NNX variable."""
    return tuple(
        (sharding.spec if isinstance(sharding, NamedSharding) else sharding) or ()
    )


Started = tuple[Params, ModelState, Any]
"""Parameters, model state, and names of the dims of parameters."""


@dataclasses.dataclass(frozen=True)
class Submodel:
    """Functions of a model that the adapter needs.

    A view is the first argument of `loss_fn`: an NNX module, or an object that acts
    like one.

    Args:
        start: Function `start(key) -> (view, started)`: a view with new parameters, and
            `started() -> (params, model_state, logical)`, called after the loss has
            used the view; `logical` has the structure of `params`.
        resume: Function `resume(params, model_state, key) -> view`; the key is None in
            evaluation.
        model_state: Function `model_state(view)`, called after the loss has used the
            view.
        needs_calls: Whether the calls of the loss create the parameters.
        given: Function that returns existing weights; None without weights.
    """

    start: Callable[[jax.Array], tuple[Any, Callable[[], Started]]]
    resume: Callable[[Params, ModelState, jax.Array | None], Any]
    model_state: Callable[[Any], ModelState]
    needs_calls: bool = False
    given: Callable[[], tuple[Params, ModelState]] | None = None


class Views(dict[str, Any]):
    """Views of several models by name, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no model is named {name!r}") from None


def combine(submodels: dict[str, Submodel]) -> Submodel:
    """Combines models by name into one model, with trees that are dicts by name.

    Each model gets a subtree and a key. Weights are given only if all models have
    weights.
    """

    def start(key: jax.Array) -> tuple[Views, Callable[[], Started]]:
        starts = {n: p.start(fold_name(key, n)) for n, p in submodels.items()}

        def started() -> Started:
            return _columns({n: started() for n, (_, started) in starts.items()})

        return Views({n: view for n, (view, _) in starts.items()}), started

    def resume(params: Params, model_state: ModelState, key: jax.Array | None) -> Any:
        # By name, so that models of one loss draw different numbers.
        keys = {n: None if key is None else fold_name(key, n) for n in submodels}
        return Views(
            {
                n: p.resume(params[n], model_state[n], keys[n])
                for n, p in submodels.items()
            }
        )

    def model_state(views: Any) -> ModelState:
        return {n: p.model_state(views[n]) for n, p in submodels.items()}

    def given() -> tuple[Params, ModelState]:
        return _columns({n: p.given() for n, p in submodels.items() if p.given})

    return Submodel(
        start=start,
        resume=resume,
        model_state=model_state,
        needs_calls=any(submodel.needs_calls for submodel in submodels.values()),
        given=given if all(submodel.given for submodel in submodels.values()) else None,
    )


def _columns(rows: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """Transposes rows of tuples by name to a tuple of dicts by name."""
    values = zip(*rows.values(), strict=True)
    return tuple(dict(zip(rows, column, strict=True)) for column in values)


def submodel_of_functions(init: Any, apply: Callable[..., Any]) -> Submodel:
    """Makes a submodel of `init(key)`, or parameters, and `apply(params, ...)`.

    The loss function calls `partial(apply, params)`, in training and in evaluation.
    """

    def start(key: jax.Array) -> tuple[Any, Callable[[], Started]]:
        params = init(key) if callable(init) else init
        logical = names_of_boxes(params, boxed=True)
        return functools.partial(apply, params), lambda: (params, {}, logical)

    def resume(params: Params, model_state: ModelState, key: jax.Array | None) -> Any:
        return functools.partial(apply, params)

    def model_state(view: Any) -> ModelState:
        return {}

    return Submodel(
        start=start,
        resume=resume,
        model_state=model_state,
        given=None if callable(init) else lambda: (init, {}),
    )
