"""Bytes of a state as a device stores it."""

import jax
import jax.numpy as jnp

from zjax.cli.bench import state_bytes
from zjax.train.state import TrainState


def test_two_int4_share_a_byte():
    """NumPy counts a byte for each, and so would the state of a QLoRA run."""
    zero = jnp.int32(0)
    codes = {"codes": jnp.zeros((3, 5), jnp.int4), "scales": jnp.zeros(3, jnp.bfloat16)}
    state = TrainState(zero, zero, codes, opt_state=(), model_state={})
    assert state_bytes(state, jax.local_devices()[0]) == 8 + 3 * 2 + 2 * 4
