"""What a function computes, in one word: to tell whether it is another one.

The word follows from the traced program: operations, shapes, dtypes, the numbers in it
and arrays that it closes over. So a learning rate, a momentum or a penalty inside
somebody's code is seen, while names and comments are not.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from zjax.jaxprs.versions import Closed, close, is_program
from zjax.sharding.mesh import trace

WHOLE_BYTES = 1 << 20
"""Arrays that are closed over count by their numbers up to here, else by shape."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def fingerprint(function: Callable[..., Any], *args: Any) -> str:
    """Traces a function and sums up its program.

    Args:
        function: Of arrays.
        *args: Arrays or their shapes.

    Returns:
        16 hexadecimal digits; another version of JAX may give others.

    Example:
        >>> fingerprint(lambda x: 2 * x, 1.0) == fingerprint(lambda y: 2 * y, 1.0)
        True
        >>> fingerprint(lambda x: 2 * x, 1.0) == fingerprint(lambda x: 3 * x, 1.0)
        False
    """
    found = hashlib.sha256()
    for word in _of_program(trace(function, *args)):
        found.update(word.encode() + b"\n")
    return found.hexdigest()[:16]


def _of_program(program: Closed) -> Iterator[str]:
    numbers: dict[Any, int] = {}
    jaxpr = program.jaxpr

    def name(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            return f"{_of_constant(atom.val)}:{atom.aval}"
        return f"{numbers.setdefault(atom, len(numbers))}:{atom.aval}"

    yield from map(_of_constant, program.consts)
    yield " ".join(map(name, (*jaxpr.constvars, *jaxpr.invars)))
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        yield " ".join(map(name, (*equation.invars, *equation.outvars)))
        for key, value in sorted(equation.params.items()):
            yield key
            yield from _of_param(value)
    yield " ".join(map(name, jaxpr.outvars))


def _of_param(value: Any) -> Iterator[str]:
    if is_program(value):
        yield from _of_program(close(value))
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _of_param(entry)
    elif not callable(value):  # a function's rules for gradients are no part of it
        yield _ADDRESS.sub("", repr(value))


def _of_constant(value: Any) -> str:
    is_key = jnp.issubdtype(getattr(value, "dtype", int), jax.dtypes.prng_key)
    data = jax.random.key_data(value) if is_key else value
    is_here = getattr(data, "is_fully_addressable", True)
    if not is_here or getattr(data, "nbytes", 0) > WHOLE_BYTES:
        return f"{data.dtype}{data.shape}"
    array = np.asarray(data)
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{array.dtype}{array.shape}{digest[:16]}"
