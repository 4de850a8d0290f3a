"""The tests check annotations while they run; fails if they no longer do."""

import beartype.roar
import jax.numpy as jnp
import jaxtyping
import pytest

from zjax.ops.rotary import rotate
from zjax.processes.host import pinnable_bytes


def test_shapes_that_do_not_agree_are_refused():
    x, table = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 4))
    rotate(x, table, table)
    with pytest.raises(jaxtyping.TypeCheckError):
        rotate(x, table, jnp.ones((1, 5, 4)))


def test_other_types_are_refused():
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
        pinnable_bytes("1")
