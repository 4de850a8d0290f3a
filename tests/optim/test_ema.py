"""The average of parameters against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from zjax.optim import transforms


def test_average_equals_numpy():
    rng = np.random.default_rng(0)
    path = rng.normal(size=(120, 5))
    want = path[0]
    got = {"w": jnp.float32(path[0])}
    update = jax.jit(lambda e, p, t: transforms.update_ema(e, p, 0.9, t))
    for step, params in enumerate(path):
        decay = min(0.9, (1 + step) / (10 + step))
        want = decay * want + (1 - decay) * params
        got = update(got, {"w": jnp.float32(params)}, jnp.int32(step))
        np.testing.assert_allclose(got["w"], want, rtol=1e-5, atol=1e-6)


def test_average_keeps_its_own_dtype():
    start = {"w": jnp.zeros(2, jnp.float32)}
    moved = transforms.update_ema(
        start, {"w": jnp.ones(2, jnp.bfloat16)}, 0.5, jnp.int32(99)
    )
    assert moved["w"].dtype == jnp.float32
    assert moved["w"].tolist() == [0.5, 0.5]
