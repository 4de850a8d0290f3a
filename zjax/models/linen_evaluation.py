"""Linen modules in evaluation, wherever they are told what mode they are in.

NNX modules have `eval()`, which sets the flags of a whole model. Linen modules have the
same flags as attributes or as arguments of calls; here both get the values of
evaluation as the calls are traced.
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
"""What flags of modules are in evaluation; the first two are those of Flax itself."""


def evaluating() -> contextlib.AbstractContextManager[Any]:
    """Has all Linen modules that are called inside act as in evaluation.

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
            # Modules are frozen; this one is a copy that lives as long as its call.
            object.__setattr__(module, field.name, FLAGS[field.name])
    try:
        given = inspect.signature(context.orig_method).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself says what is wrong
        return call(*args, **kwargs)
    for name, value in given.arguments.items():
        if name in FLAGS and isinstance(value, bool):
            given.arguments[name] = FLAGS[name]
    return call(*given.args, **given.kwargs)
