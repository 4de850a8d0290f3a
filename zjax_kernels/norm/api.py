"""Layer norm and RMS norm over the last dim, computed in float32 for any input dtype.

The residuals are the input and each row's mean and inverse deviation (the inverse
deviation alone for `rms_norm`). Forward-mode differentiation is not defined.
"""

import functools

import jax.numpy as jnp
from jax import Array, custom_vjp
from jax.ad_checkpoint import checkpoint_name

from zjax_kernels.device import DTYPES, choose_implementation, load_implementation
from zjax_kernels.norm.reference import MAX_CHANNELS, THREADS

STATISTICS = "norm_statistics"
"""`checkpoint_name` of the residuals: mean and inverse deviation of each row."""


def layer_norm(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    implementation: str = "auto",
) -> Array:
    """Normalises the last dim to mean 0 and standard deviation 1, scales and shifts.

    Args:
        x: [..., C], any floating dtype.
        scale: [C] factor per channel.
        bias: [C] offset per channel, or None.
        eps: Number added to the variance, above 0.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit input, a multiple of 128
            channels up to 4096), `reference` (anywhere, any sharding), or `auto`, which
            takes `reference` where the compiler shards the program.

    Returns:
        [..., C] in the dtype of `x`.

    Raises:
        ValueError: Unknown implementation, or arrays that the kernel does not support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> x = jnp.array([[-3.0, 3.0]])
        >>> layer_norm(x, jnp.ones(2)).round(3).tolist()
        [[-1.0, 1.0]]

    Reference:
        Ba et al., Layer Normalization (arXiv:1607.06450).
    """
    return _normalize(eps, True, _choose(implementation, x), x, scale, bias)


def rms_norm(
    x: Array, scale: Array, *, eps: float = 1e-5, implementation: str = "auto"
) -> Array:
    """Divides by the root mean square; arguments and errors as in `layer_norm`.

    Example:
        >>> rms_norm(jnp.array([[3.0, 3.0]]), jnp.ones(2)).round(3).tolist()
        [[1.0, 1.0]]

    Reference:
        Zhang and Sennrich (arXiv:1910.07467).
    """
    return _normalize(eps, False, _choose(implementation, x), x, scale, None)


@functools.partial(custom_vjp, nondiff_argnums=(0, 1, 2))
def _normalize(eps, centre, implementation, x, scale, bias):
    return _forward(eps, centre, implementation, x, scale, bias)[0]


def _forward(eps, centre, implementation, x, scale, bias):
    """Returns the output and the residuals."""
    run = load_implementation("norm", implementation).forward
    out, mean, inverse = run(x, scale, bias, eps=eps, centre=centre)
    # RMS norm saves no mean: zeros would be stored on every device.
    statistics = (mean, inverse) if centre else (inverse,)
    return out, (x, checkpoint_name(statistics, STATISTICS), scale, bias)


def _backward(eps, centre, implementation, residuals, d_out):
    """Returns the cotangents of input, scale and bias."""
    x, (*means, inverse), scale, bias = residuals
    mean = means[0] if centre else jnp.zeros_like(inverse)
    run = load_implementation("norm", implementation).backward
    dx, d_scale, d_bias = run(x, mean, inverse, scale, d_out, centre=centre)
    return (
        dx,
        d_scale.astype(scale.dtype),
        None if bias is None else d_bias.astype(bias.dtype),
    )


_normalize.defvjp(_forward, _backward)


def _choose(implementation, x):
    """Returns the implementation for an array, or refuses the array."""
    dtype, channels = jnp.dtype(x.dtype).name, x.shape[-1]
    problem = remedy = ""
    if dtype not in DTYPES:
        problem = f"it needs {' or '.join(DTYPES)} and the array is {dtype}"
        remedy = "cast it"
    elif channels % THREADS or channels > MAX_CHANNELS or not x.size:
        problem = f"it needs rows of 128, 256, ... {MAX_CHANNELS} and this is {x.shape}"
        remedy = "pad the channels"
    arrays = f"{dtype}, {channels} channels"
    return choose_implementation(
        implementation, "normalisation", arrays, problem=problem, remedy=remedy
    )
