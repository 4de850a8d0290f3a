"""Plain functions `init` and `apply` as submodels."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from zjax.models.metadata import names_of_boxes
from zjax.models.submodel import Started, Submodel
from zjax.typing import ModelState, Params


def make_submodel(init: Any, apply: Callable[..., Any]) -> Submodel:
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
