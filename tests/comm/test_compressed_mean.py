"""Means of packed messages with error feedback, against explicit workers in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zjax.comm.codecs import make_codec
from zjax.comm.compressed_mean import Errors, compressed_mean


def mapped_mean(codec, num_workers):
    """`compressed_mean` of arrays whose dim 0 is the worker."""
    mesh = Mesh(jax.devices()[:num_workers], "replica")

    def run(x, errors):
        x, errors = jax.tree.map(lambda a: a[0], (x, errors))
        result = compressed_mean(x, errors, codec, "replica")
        return jax.tree.map(lambda a: a[None], result)

    spec = P("replica")
    return jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"replica"}
        )
    )


def zero_errors(num_workers, n):
    return Errors(
        jnp.zeros((num_workers, n)), jnp.zeros((num_workers, n // num_workers))
    )


def test_the_mean_of_signs_is_the_published_one():
    """Vectors of appendix A.1: one scale per worker, then one per chunk."""
    x = np.stack([np.arange(16) - 4.0, np.arange(16) % 5 - 1.5]).astype(np.float32)
    mean, errors = mapped_mean(make_codec("onebit"), 2)(x, zero_errors(2, 16))
    expected = [-2.989565] * 4 + [2.989565] * 4 + [3.16587] * 8
    np.testing.assert_allclose(mean, [expected] * 2, rtol=1e-6)
    first = [1.787918, 2.787918, 3.787918, 4.787918]
    first += [-5.787918, -4.787918, -3.787918, -2.787918]
    np.testing.assert_allclose(errors.worker[0, :8], first, rtol=1e-6)
    a, b, c, d = 0.654394, 0.845606, 0.478089, 1.021911
    expected = [[-a, -a, b, b, a, -b, -b, a], [c, c, -d, -d, c, c, c, -d]]
    np.testing.assert_allclose(errors.server, expected, rtol=0, atol=1e-6)
