"""One model of a loss, whatever library wrote it; several of them are one again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zjax.ops.keys import fold_name
from zjax.typing import ModelState, Params

Started = tuple[Params, ModelState, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """What the adapter asks of a library.

    A view is what `loss_fn` calls: an NNX module, or an object that acts like one.

    Args:
        start: `start(key) -> (view, started)`: a view with new parameters, and
            `started() -> (params, model_state, logical)`, to be asked once the loss has
            used the view; `logical` has the structure of `params`.
        resume: `resume(params, model_state, key) -> view`; a key of None means
            evaluation.
        model_state: `model_state(view)`, after the loss has used it.
        needs_calls: Whether `start` leaves it to the calls of the loss to create
            parameters.
        given: Weights that exist already.
    """

    start: Callable[[jax.Array], tuple[Any, Callable[[], Started]]]
    resume: Callable[[Params, ModelState, jax.Array | None], Any]
    model_state: Callable[[Any], ModelState]
    needs_calls: bool = False
    given: Callable[[], tuple[Params, ModelState]] | None = None


class Views(dict[str, Any]):
    """The views of several models by name, as items and as attributes.

    Example:
        >>> views = Views(generator=1, critic=2)
        >>> views.critic, views["critic"]
        (2, 2)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no model is named {name!r}") from None


def combine(parts: dict[str, Part]) -> Part:
    """Makes several models one, whose trees are dicts of theirs.

    Args:
        parts: Models by name.

    Returns:
        A part that hands each model its own subtree and key. It has given weights only
        where all of its models have.
    """

    def start(key: jax.Array) -> tuple[Views, Callable[[], Started]]:
        starts = {n: p.start(fold_name(key, n)) for n, p in parts.items()}

        def started() -> Started:
            return _columns({n: started() for n, (_, started) in starts.items()})

        return Views({n: view for n, (view, _) in starts.items()}), started

    def resume(params: Params, model_state: ModelState, key: jax.Array | None) -> Any:
        keys = {n: None if key is None else fold_name(key, n) for n in parts}
        return Views(
            {n: p.resume(params[n], model_state[n], keys[n]) for n, p in parts.items()}
        )

    def model_state(views: Any) -> ModelState:
        return {n: p.model_state(views[n]) for n, p in parts.items()}

    def given() -> tuple[Params, ModelState]:
        return _columns({n: p.given() for n, p in parts.items() if p.given})

    return Part(
        start=start,
        resume=resume,
        model_state=model_state,
        needs_calls=any(part.needs_calls for part in parts.values()),
        given=given if all(part.given for part in parts.values()) else None,
    )


def _columns(rows: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    values = zip(*rows.values(), strict=True)
    return tuple(dict(zip(rows, column, strict=True)) for column in values)
