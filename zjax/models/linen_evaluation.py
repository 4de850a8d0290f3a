"""Sets the mode flags of Linen modules to evaluation, as NNX's `eval()` does.

Linen modules take the flags as attributes or as call arguments; an interceptor of calls
overrides both.
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
"""Values in evaluation. Flax defines the first two; the others are customary names."""


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
    module = context.module
    for field in dataclasses.fields(module):
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
