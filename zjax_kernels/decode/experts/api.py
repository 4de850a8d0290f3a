"""Experts of few rows: checks and choice of implementation."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array

from zjax_kernels.decode.experts.reference import (
    LANES,
    SCORES,
    Choice,
    ExpertOperands,
    RouterOperands,
    RouterOptions,
    Scores,
)
from zjax_kernels.decode.product.api import MAX_ROWS, Implementation
from zjax_kernels.decode.product.reference import ACTIVATIONS, Activation, Options
from zjax_kernels.decode.product.tuning import CHUNK
from zjax_kernels.device import (
    DTYPES,
    choose_implementation,
    describe,
    load_implementation,
    refuse,
)

MAX_EXPERTS = 256
"""Experts whose scores fit in the registers of a program."""


def choose_experts(
    x: Array,
    matrix: Array,
    *,
    num_experts: int,
    top_k: int,
    scores: Scores = "softmax",
    normalise: bool = True,
    scale: float = 1.0,
    bias: Array | None = None,
    logit_bias: Array | None = None,
    counts: Array | None = None,
    norm: tuple[Array, float] | None = None,
    early: bool = False,
    implementation: Implementation = "auto",
) -> Choice:
    """Chooses the experts of few rows, and lists the experts that any row chose.

    Among equal scores a row takes the first expert.

    Args:
        x: [N, K] rows.
        matrix: [terms K, E'] matrix of the router, from `lay_router`.
        num_experts: Experts to choose from, 1 or more.
        top_k: Experts that each row chooses, 1 to `num_experts`.
        scores: `softmax` of all logits, or `sigmoid` of each.
        normalise: Whether the weights of a row are divided by the sum, for a `top_k`
            above 1.
        scale: Factor of the weights.
        bias: [E] added to the scores for the choice, not for the weights, or None.
        logit_bias: [E] added to the logits, or None.
        counts: bool[N], False for padding, which chooses nothing; None for all rows.
        norm: Scale [K] and number added to the mean square, at least 0, of an RMS norm
            of the rows, or None.
        early: Whether the kernel reads `matrix` while the operations before still run
            (dependent launch, JAX 0.11.2 or newer). No recent operation may compute it.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit rows and matrix of one
            dtype, 1 to 64 rows, K a multiple of 64, up to 256 experts), `reference`
            (anywhere), or `auto`: `mosaic_gpu` where possible, logged once.

    Returns:
        Choice, of logits that are summed in float32. There is no gradient rule.

    Raises:
        ValueError: Shapes do not fit, numbers are out of range, or the kernel does not
            support the arrays.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> from zjax_kernels import lay_router
        >>> matrix = lay_router(jnp.eye(4), jnp.float32)
        >>> x = jnp.array([[0.0, 3.0, 1.0, 2.0]])
        >>> choice = choose_experts(x, matrix, num_experts=4, top_k=2)
        >>> choice.ids.tolist(), choice.count.tolist()
        ([1, 3], [2, 2])

    Reference:
        DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, on sigmoid scores and the bias.
    """
    norm_scale, eps = (None, 0.0) if norm is None else norm
    operands = RouterOperands(x, matrix, bias, logit_bias, counts, norm_scale)
    numbers = float(scale), float(eps)
    options = RouterOptions(num_experts, top_k, scores, normalise, *numbers, early)
    refuse([*_router_problems(operands, options)])
    problem, remedy = _row_obstacle(x)
    if not problem and matrix.dtype != x.dtype:
        problem = f"it needs a matrix of {x.dtype} and this is of {matrix.dtype}"
        remedy = "use lay_router"
    elif not problem and num_experts > MAX_EXPERTS:
        problem = f"it needs up to {MAX_EXPERTS} experts and these are {num_experts}"
        remedy = "use fewer"
    chosen = choose_implementation(
        implementation,
        "router of few rows",
        f"{matrix.dtype.name}, {len(x)} x {num_experts}",
        problem=problem,
        remedy=remedy,
    )
    run = load_implementation("decode.experts", chosen).choose_experts
    return run(operands, options)


def few_rows_experts(
    x: Array,
    choice: Choice,
    up: Array,
    down: Array,
    *,
    norm: tuple[Array, float] | None = None,
    activation: Activation = "swiglu",
    residual: Array | None = None,
    up_bias: Array | None = None,
    down_bias: Array | None = None,
    early: bool = False,
    implementation: Implementation = "auto",
) -> Array:
    """Adds up the outputs of the experts that few rows chose, by their weights.

    The matrices of each chosen expert are read once, and of no other expert. Hidden
    channels are multiplied by the weight of the expert in float32, before they are
    rounded; `grouped_matmul` and a weighted sum round the outputs of the experts
    instead. Results repeat bit by bit. A row does not depend on the other rows.

    Args:
        x: [N, K] rows.
        choice: Choice of the rows, from `choose_experts` or `Choice.of`.
        up: [E, K, F] matrices in the dtype of `x`; [E, K, 2 F], gates before values,
            for an activation with gates.
        down: [E, F, M] matrices in the dtype of `x`.
        norm: Scale [K] and number added to the mean square, at least 0, of an RMS norm
            of the rows, or None.
        activation: `gelu` (with tanh), or with gates `swiglu`, `geglu` or
            `clamped_swiglu`, in float32.
        residual: [N, M] in the dtype of `x`, added to the result, or None.
        up_bias: [E, F] or [E, 2 F] floats, added to the hidden channels before the
            activation, or None.
        down_bias: [E, M] floats, added to the outputs of the experts, or None.
            `mosaic_gpu` rounds the sum of biases and residual once more.
        early: Whether the kernels start while the operations before still run
            (dependent launch, JAX 0.11.2 or newer). No recent operation may compute
            `up` and `down`.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit arrays, 1 to 64 rows, K, F
            and M multiples of 64), `reference` (anywhere), or `auto`: `mosaic_gpu`
            where possible, logged once.

    Returns:
        [N, M] in the dtype of `x`, summed in float32. There is no gradient rule.

    Raises:
        ValueError: Shapes or dtypes do not fit, an unknown activation, or arrays that
            the kernel does not support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> choice = Choice.of(jnp.array([[0.0], [0.5]]), 1)
        >>> up, down = jnp.ones((2, 4, 2)), jnp.ones((2, 1, 4))
        >>> x = jnp.ones((1, 4)) / 4
        >>> [row] = few_rows_experts(x, choice, up, down).tolist()
        >>> [round(number, 2) for number in row]
        [0.37, 0.37, 0.37, 0.37]

    Reference:
        Gale et al., MegaBlocks (arXiv:2211.15841), on experts without padding.
    """
    scale, eps = (None, 0.0) if norm is None else norm
    operands = ExpertOperands(x, up, down, scale, residual, up_bias, down_bias)
    options = Options(eps=float(eps), activation=activation, early=early)
    refuse([*_option_problems(activation, eps)])
    refuse([*_expert_problems(operands, choice, options)])
    problem, remedy = _row_obstacle(x)
    if not problem:
        problem, remedy = _width_obstacle(down)
    chosen = choose_implementation(
        implementation,
        "experts of few rows",
        f"{up.dtype.name}, {len(x)} rows, {' x '.join(map(str, down.shape))}",
        problem=problem,
        remedy=remedy,
    )
    run = load_implementation("decode.experts", chosen).few_rows_experts
    return run(operands, choice, options)


def _row_obstacle(x: Array) -> tuple[str, str]:
    """Returns problem and remedy of rows without a kernel, or empty strings."""
    if x.dtype.name not in DTYPES:
        return f"it needs {' or '.join(DTYPES)} rows and x is {x.dtype}", "cast it"
    if not 1 <= len(x) <= MAX_ROWS:
        problem = f"it needs 1 to {MAX_ROWS} rows and x has {len(x)}"
        return problem, "use grouped_matmul"
    if x.shape[1] % CHUNK or not x.shape[1]:
        problem = f"it needs a multiple of {CHUNK} inputs, not {x.shape[1]}"
        return problem, "pad them"
    return "", ""


def _width_obstacle(down: Array) -> tuple[str, str]:
    """Returns problem and remedy of experts without a kernel, or empty strings."""
    _, hidden, columns = down.shape
    if hidden % CHUNK or columns % CHUNK or not hidden * columns:
        problem = f"it needs multiples of {CHUNK} hidden channels and outputs, not "
        return f"{problem}{hidden} and {columns}", "pad them"
    return "", ""


def _option_problems(activation: str, eps: float) -> Iterator[str]:
    """Yields unknown activations and numbers out of range."""
    if activation not in ACTIVATIONS or not activation:
        remedy = f"use one of {', '.join(filter(None, ACTIVATIONS))}"
        yield describe("activation", activation, "is not an activation", remedy)
    if eps < 0:
        yield describe("norm[1]", eps, "is below 0", "use 1e-5")


def _router_problems(operands: RouterOperands, options: RouterOptions) -> Iterator[str]:
    """Yields numbers out of range, and arrays that do not fit x."""
    x, matrix, bias, logit_bias, counts, norm = operands
    if options.scores not in SCORES:
        remedy = f"use {' or '.join(SCORES)}"
        yield describe("scores", options.scores, "is not a function", remedy)
    if options.eps < 0:
        yield describe("norm[1]", options.eps, "is below 0", "use 1e-5")
    number = options.num_experts
    if not 1 <= options.top_k <= number:
        problem = f"is not a number of the {number} experts"
        yield describe("top_k", options.top_k, problem, f"use 1 to {number}")
    if x.ndim != 2:
        yield describe("x.shape", x.shape, "does not have 2 dims", "give [N, K]")
        return
    rows, depth = x.shape
    has_columns = matrix.ndim == 2 and matrix.shape[1] == options.columns
    if not has_columns or not len(matrix) or len(matrix) % depth:
        problem = f"does not fit x of shape {x.shape} and {number} experts"
        yield describe("matrix.shape", matrix.shape, problem, "use lay_router")
    fitting: dict[str, tuple[Any, tuple[int, ...]]] = {
        "bias": (bias, (number,)),
        "logit_bias": (logit_bias, (number,)),
        "counts": (counts, (rows,)),
        "norm[0]": (norm, (depth,)),
    }
    yield from _misfits(fitting, f"x of shape {x.shape}")


def _expert_problems(
    operands: ExpertOperands, choice: Choice, options: Options
) -> Iterator[str]:
    """Yields arrays that do not fit one another."""
    x, up, down, norm, residual, up_bias, down_bias = operands
    arrays = {"x": (x, 2, "[N, K]"), "down": (down, 3, "[E, F, M]")}
    for name, (array, dims, form) in arrays.items():
        if array.ndim != dims:
            problem, remedy = f"does not have {dims} dims", f"give {form}"
            yield describe(f"{name}.shape", array.shape, problem, remedy)
            return
    (rows, depth), (experts, hidden, columns) = x.shape, down.shape
    padded = -(-experts // LANES) * LANES, -(-rows // 8) * 8
    fitting = {
        "choice.gates": (choice.gates, padded),
        "up": (up, (experts, depth, hidden * options.num_parts)),
        "up_bias": (up_bias, (experts, hidden * options.num_parts)),
        "down_bias": (down_bias, (experts, columns)),
        "norm[0]": (norm, (depth,)),
        "residual": (residual, (rows, columns)),
    }
    others = f"x of shape {x.shape} and down of shape {down.shape}"
    yield from _misfits(fitting, others)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        yield describe("x.dtype", x.dtype, "is not of floats", "cast the arrays")
    for name, array in {"up": up, "down": down, "residual": residual}.items():
        if array is not None and array.dtype != x.dtype:
            problem = f"is not the dtype of x, {x.dtype}"
            yield describe(f"{name}.dtype", array.dtype, problem, "cast one")


def _misfits(
    fitting: dict[str, tuple[Any, tuple[int, ...]]], others: str
) -> Iterator[str]:
    """Yields arrays of another shape than the one that fits."""
    for name, (array, shape) in fitting.items():
        if array is not None and array.shape != shape:
            problem, remedy = f"does not fit {others}", f"give {shape}"
            yield describe(f"{name}.shape", array.shape, problem, remedy)
