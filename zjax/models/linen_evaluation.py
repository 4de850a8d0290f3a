"""Sets the mode flags of Linen modules to evaluation, as NNX's `eval()` does.

Linen modules have them as attributes or as arguments of calls; both are overridden when
the calls are traced.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn

FLAGS = {
    "deterministic": True,
    "use_running_average": True,
    "train": False,
    "training": False,
    "is_training": False,
}
"""Flags in evaluation; the first two are those of Flax itself."""


def evaluating() -> contextlib.AbstractContextManager[Any]:
    """Runs all Linen modules that are called inside in evaluation mode.

    Example:
        >>> import jax
        >>> with evaluating():
        ...     print(nn.Dropout(0.5, deterministic=False).apply({}, jax.numpy.ones(2)))
        [1. 1.]
    """
    return nn.intercept_methods(_call)


def _call(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
) -> Any:
    module = context.module
    for field in dataclasses.fields(module):
        if field.name in FLAGS and isinstance(getattr(module, field.name, None), bool):
            # Modules are frozen; this one is a copy for this call.
            object.__setattr__(module, field.name, FLAGS[field.name])
    try:
        given = inspect.signature(context.orig_method).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself raises a better error
        return call(*args, **kwargs)
    for name, value in given.arguments.items():
        if name in FLAGS and isinstance(value, bool):
            given.arguments[name] = FLAGS[name]
    return call(*given.args, **given.kwargs)
