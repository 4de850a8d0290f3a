"""Tuning of the kernel of routers: one cluster that has the whole matrix."""

import functools

from zjax_kernels.decode.product.tuning import CHUNK, MAX_SPLITS, Tuning, num_stages

_LEAST_STAGES = 2


def choose_router(
    rows: int, depth: int, columns: int, *, normal: bool = False
) -> Tuning:
    """Returns the tuning for `rows` and a matrix of `depth` rows, in all terms.

    As many SMs as a cluster has read the matrix, unless sums fill the memory of one.
    """
    find = functools.partial(num_stages, rows, columns, normal=normal)
    most = min(depth // CHUNK, MAX_SPLITS)
    fitting = (n for n in range(most, 1, -1) if find(n, 1) >= _LEAST_STAGES)
    splits = next(fitting, 1)
    # A stage more than there are steps would stay empty.
    stages = min(find(splits, 1), -(-depth // CHUNK // splits))
    return Tuning(columns, splits, max(stages, _LEAST_STAGES))
