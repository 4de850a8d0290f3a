"""A Linen module as a part: variables beside it, created by the calls of the loss."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import flax.linen as nn
import jax
from flax.core import meta

from zjax.models.part import Part, Started, check_logical
from zjax.ops.keys import fold_name
from zjax.sharding.placement import path_of
from zjax.typing import ModelState, Params

SOWN = ("intermediates", "losses", "perturbations")
"""Collections that a call leaves behind for the loss to read, and no step keeps. So are
collections of tuples, which is what `Module.sow` makes of any name."""


class View:
    """A Linen module with its variables, called as the module is.

    Args:
        module: The module.
        params: Its parameters.
        model_state: Its other collections, updated by calls in training.
        key: Where random streams start; None means evaluation.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Params,
        model_state: ModelState,
        key: jax.Array | None,
    ):
        self.module = module
        self.params = params
        self.model_state = model_state
        self.train = key is not None
        """Whether this is a training step; for arguments such as `deterministic`."""
        self.sown: dict[str, Any] = {}
        """What the calls so far have sown, by collection."""
        self._key = key
        self._num_calls = 0

    def __call__(
        self, *args: Any, method: str | Callable[..., Any] | None = None, **kwargs: Any
    ) -> Any:
        """Runs the module, or another method of it, on the current variables."""
        if self.train:
            frozen, rngs = ("params",), _streams(self._key, self._num_calls)
        else:
            frozen, rngs = ("params", *self.model_state), {}
        self._num_calls += 1
        out, updates = self.module.apply(
            {"params": self.params, **self.model_state, **self.sown},
            *args,
            method=method,
            rngs=rngs,
            mutable=flax.core.DenyList(frozen),
            **kwargs,
        )
        for name, value in updates.items():
            target = self.model_state if name in self.model_state else self.sown
            target[name] = value
        return out


class FirstView:
    """A Linen module that creates its variables as it is called.

    Args:
        module: The module.
        key: Where parameters and random streams start.
    """

    train = True

    def __init__(self, module: nn.Module, key: jax.Array):
        self.module = module
        self.variables: dict[str, Any] = {}
        self.sown: dict[str, Any] = {}
        self._key = key

    def __call__(
        self, *args: Any, method: str | Callable[..., Any] | None = None, **kwargs: Any
    ) -> Any:
        """Runs the module, and adds to the variables those that were missing."""
        # Every call starts from the same key, so calls agree on what they share.
        out, created = self.module.init_with_output(
            _streams(self._key, 0), *args, method=method, mutable=True, **kwargs
        )
        for name, value in created.items():
            if _is_sown(name, value):
                self.sown[name] = value
            else:
                self.variables[name] = _merge(value, self.variables.get(name, {}))
        return out


def make_part(module: nn.Module) -> Part:
    """Presents a Linen module to the adapter.

    Args:
        module: An unbound module.

    Returns:
        The part; every collection but `params` and those sown is model state.
    """

    def start(key: jax.Array) -> tuple[FirstView, Callable[[], Started]]:
        view = FirstView(module, key)

        def started() -> Started:
            rest = dict(view.variables)
            params = rest.pop("params", {})
            return meta.unbox(params), meta.unbox(rest), _logical(params)

        return view, started

    def resume(params: Params, model_state: ModelState, key: jax.Array | None) -> View:
        return View(module, params, dict(model_state), key)

    def model_state(view: Any) -> ModelState:
        return view.model_state

    return Part(
        start=start,
        resume=resume,
        model_state=model_state,
        needs_calls=True,
    )


def _streams(key: Any, num_calls: int) -> dict[str, jax.Array]:
    # Flax takes streams of other names from "params".
    key = jax.random.fold_in(key, num_calls)
    return {name: fold_name(key, name) for name in ("params", "dropout")}


def _is_sown(name: str, collection: Any) -> bool:
    def is_tuple(x: Any) -> bool:
        return type(x) is tuple

    leaves = jax.tree.leaves(collection, is_leaf=is_tuple)
    return name in SOWN or any(map(is_tuple, leaves))


def _merge(new: Any, old: Any) -> Any:
    if not isinstance(new, Mapping) or not isinstance(old, Mapping):
        return old
    merged = {k: _merge(new[k], old[k]) for k in new.keys() & old.keys()}
    return {**new, **old, **merged}


def _is_box(x: Any) -> bool:
    return isinstance(x, meta.AxisMetadata)


def _logical(params: Any) -> Any:
    def names(keys: Any, x: Any) -> Any:
        if isinstance(x, meta.Partitioned):
            return check_logical(path_of(keys), tuple(x.names), x.value.ndim)
        return None

    return jax.tree_util.tree_map_with_path(names, params, is_leaf=_is_box)
