"""Products of float8 operands in NumPy, in float64 but for the rounding."""

import ml_dtypes
import numpy as np

E4M3 = (ml_dtypes.float8_e4m3fn, 8)
E5M2 = (ml_dtypes.float8_e5m2, 15)


def rounded(x, form):
    """What is left of an array at one scale."""
    dtype, top = form
    mantissa, exponent = np.frexp(np.abs(x).max())
    shift = top - (exponent if mantissa >= 0.75 else exponent - 1)
    return np.ldexp(np.ldexp(x, shift).astype(dtype).astype(np.float64), -shift)


def by_share(x, num_batch_shards, form):
    return np.concatenate(
        [rounded(part, form) for part in np.split(x, num_batch_shards)]
    )


def product_and_gradients(x, kernel, dy, num_contracted, num_batch_shards):
    """`x` times `kernel`, and the gradients of both for that of the product."""
    x, kernel, dy = (np.asarray(a, np.float64) for a in (x, kernel, dy))
    x, dy = by_share(x, num_batch_shards, E4M3), by_share(dy, num_batch_shards, E5M2)
    kernel = rounded(kernel, E4M3)
    rows = tuple(range(x.ndim - num_contracted))
    outputs = tuple(range(len(rows), dy.ndim))
    columns = tuple(range(num_contracted, kernel.ndim))
    return (
        np.tensordot(x, kernel, num_contracted),
        np.tensordot(dy, kernel, (outputs, columns)),
        np.tensordot(x, dy, (rows, rows)),
    )
