"""A digest of what a function computes, to detect that it has changed.

It covers the traced program: operations, shapes, dtypes, constants, and arrays closed
over. So a learning rate or penalty inside user code counts; names and comments do not.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from zjax.jaxprs.versions import is_program
from zjax.sharding.mesh import trace

MAX_HASHED_BYTES = 1 << 20
"""Larger arrays that are closed over count by shape alone."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def fingerprint(function: Callable[..., Any], *args: Any) -> str:
    """Traces a function of arrays and hashes its program.

    Returns:
        16 hexadecimal digits, which may differ between versions of JAX.

    Example:
        >>> fingerprint(lambda x: 2 * x, 1.0) == fingerprint(lambda y: 2 * y, 1.0)
        True
        >>> fingerprint(lambda x: 2 * x, 1.0) == fingerprint(lambda x: 3 * x, 1.0)
        False
    """
    digest = hashlib.sha256()
    for word in _hash_program(trace(function, *args)):
        digest.update(word.encode() + b"\n")
    return digest.hexdigest()[:16]


def _hash_program(program: Any) -> Iterator[str]:
    """Of a closed program, or of a kernel whose constants are not bound yet."""
    numbers: dict[Any, int] = {}
    jaxpr = getattr(program, "jaxpr", program)

    def name(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            return f"{_hash_constant(atom.val)}:{atom.aval}"
        return f"{numbers.setdefault(atom, len(numbers))}:{atom.aval}"

    yield from map(_hash_constant, getattr(program, "consts", ()))
    yield " ".join(map(name, (*jaxpr.constvars, *jaxpr.invars)))
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        yield " ".join(map(name, (*equation.invars, *equation.outvars)))
        for key, value in sorted(equation.params.items()):
            yield key
            yield from _hash_param(value)
    yield " ".join(map(name, jaxpr.outvars))


def _hash_param(value: Any) -> Iterator[str]:
    if is_program(value):
        yield from _hash_program(value)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _hash_param(entry)
    elif not callable(value):  # custom gradient rules do not count
        yield _ADDRESS.sub("", repr(value))


def _hash_constant(value: Any) -> str:
    if isinstance(value, jax_core.Tracer):  # memory that a kernel refers to
        return f"{value.aval}"
    is_key = jnp.issubdtype(getattr(value, "dtype", int), jax.dtypes.prng_key)
    data = jax.random.key_data(value) if is_key else value
    is_here = getattr(data, "is_fully_addressable", True)
    if not is_here or getattr(data, "nbytes", 0) > MAX_HASHED_BYTES:
        return f"{data.dtype}{data.shape}"
    array = np.asarray(data)
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{array.dtype}{array.shape}{digest[:16]}"
