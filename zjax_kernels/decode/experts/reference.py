"""Experts of few rows in jax.numpy: the specification of the kernels, on any device."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from zjax_kernels.decode.product.reference import Options, normalised

Scores = Literal["softmax", "sigmoid"]
SCORES = get_args(Scores)
LANES = 64
"""Multiple of experts for which a router's matrix has columns."""
LEAST = 1e-18
"""Least divisor of scores: the square of the inverse is finite in float32."""
_NUM_TERMS = 3
"""Three bfloat16 significands of 8 bits hold the 24 bits of a float32 significand."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
    """Experts that few rows choose, and the weights of the experts.

    Args:
        gates: float32[E', N'] weight of each expert in each row, 0 where the row does
            not choose the expert. Experts are padded to a multiple of 64, rows to a
            multiple of 8.
        ids: int32[`most` or more] experts that any row chooses, in ascending order;
            then -1.
        count: int32[`most` or more] number of experts that any row chooses, in each
            entry.
        most: Most experts that the rows can choose; static.
    """

    gates: Any
    ids: Any
    count: Any
    most: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, gates: Array, most: int) -> "Choice":
        """Lists the experts of which a gate, float32[E, N], is not 0."""
        experts, rows = gates.shape
        used = (gates != 0).any(1)
        place = jnp.where(used, jnp.cumsum(used) - 1, most)
        # As one comparison of all pairs: a scatter would be another small kernel.
        is_here = place[None] == jnp.arange(most)[:, None]
        number = jnp.arange(1, experts + 1)[None]
        ids = jnp.where(is_here, number, 0).sum(1) - 1
        gates = jnp.pad(gates, ((0, -experts % LANES), (0, -rows % 8)))
        count = jnp.full(most, used.sum())
        return cls(gates, ids.astype(jnp.int32), count.astype(jnp.int32), most)


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """Static choices of a router.

    Args:
        num_experts: Number of experts.
        top_k: Experts that each row chooses.
        scores: Function from logits to scores.
        normalise: Whether the weights of a row add up to `scale`.
        scale: Factor of the weights.
        eps: Number added to the mean square of the norm.
        early: Whether the matrix is read before the last kernels end.
    """

    num_experts: int
    top_k: int
    scores: Scores = "softmax"
    normalise: bool = True
    scale: float = 1.0
    eps: float = 0.0
    early: bool = False

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return -(-self.num_experts // LANES) * LANES

    def most(self, rows: int) -> int:
        """Returns the most experts that some rows choose."""
        return min(self.num_experts, rows * self.top_k)


class RouterOperands(NamedTuple):
    """Arrays of a router.

    Args:
        x: [N, K] rows.
        matrix: [terms K, E'] terms of the matrix, see `lay_router`.
        bias: [E] added to the scores for the choice alone, or None.
        logit_bias: [E] added to the logits, or None.
        counts: bool[N] rows that choose, or None for all.
        norm: [K] scale of the RMS norm of the rows, or None.
    """

    x: Array
    matrix: Array
    bias: Array | None = None
    logit_bias: Array | None = None
    counts: Array | None = None
    norm: Array | None = None


class ExpertOperands(NamedTuple):
    """Arrays of experts.

    Args:
        x: [N, K] rows.
        up: [E, K, F], or [E, K, 2 F] of gates and values.
        down: [E, F, M].
        norm: [K] scale of the RMS norm of the rows, or None.
        residual: [N, M] that is added to the result, or None.
        up_bias: [E, F] or [E, 2 F] biases of the hidden channels, or None.
        down_bias: [E, M] biases of the outputs, or None.
    """

    x: Array
    up: Array
    down: Array
    norm: Array | None = None
    residual: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None


def lay_router(kernel: Array, dtype: Any) -> Array:
    """Lays a router's matrix for rows of a dtype, so that no number is rounded.

    For bfloat16 rows a float32 matrix becomes three bfloat16 terms, one behind the
    other, which add up to the matrix, the largest first.

    Args:
        kernel: [K, E] matrix.
        dtype: Dtype of the rows.

    Returns:
        [terms * K, E'], with E' columns: E, padded with zeros to a multiple of 64.

    Example:
        >>> lay_router(jnp.ones((2, 3)), jnp.bfloat16).shape
        (6, 64)
    """
    kernel = jnp.pad(kernel, ((0, 0), (0, -kernel.shape[1] % LANES)))
    if jnp.dtype(dtype) != jnp.bfloat16 or kernel.dtype != jnp.float32:
        return kernel
    terms = []
    for _ in range(_NUM_TERMS):
        # A compiler may drop a pair of dtype conversions, but not this.
        term = lax.reduce_precision(kernel, exponent_bits=8, mantissa_bits=7)
        terms.append(term.astype(jnp.bfloat16))
        kernel = kernel - term
    return jnp.concatenate(terms)


def router_logits(operands: RouterOperands, options: RouterOptions) -> Array:
    """Computes the logits of a router: float32[N, E]."""
    x, matrix, _, logit_bias, _, norm = operands
    x = normalised(x, norm, options.eps)
    if x.dtype != matrix.dtype:
        x, matrix = x.astype(jnp.float32), matrix.astype(jnp.float32)
    # Products of two numbers of 16 bits are exact in float32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide = {"precision": precision, "preferred_element_type": jnp.float32}
    # The smallest term first.
    terms = jnp.split(matrix, len(matrix) // x.shape[1])[::-1]
    logits = sum(jnp.dot(x, term, **wide) for term in terms)
    logits = jnp.asarray(logits)[:, : options.num_experts]
    if logit_bias is None:
        return logits
    return logits + logit_bias.astype(jnp.float32)[None]


def choose_experts(operands: RouterOperands, options: RouterOptions) -> Choice:
    """Chooses the experts of each row; among equal scores the first."""
    logits = router_logits(operands, options)
    sigmoid = options.scores == "sigmoid"
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits)
    ranked = scores
    if operands.bias is not None:
        ranked = scores + operands.bias.astype(jnp.float32)[None]
    experts = lax.top_k(ranked, options.top_k)[1]
    rows = jnp.arange(len(scores))[:, None]
    is_chosen = jnp.zeros(scores.shape, bool).at[rows, experts].set(True)
    gates = jnp.where(is_chosen, scores, 0.0)
    if options.normalise and options.top_k > 1:
        gates /= jnp.maximum(gates.sum(1, keepdims=True), LEAST)
    gates *= options.scale
    if operands.counts is not None:
        gates = jnp.where(operands.counts[:, None], gates, 0.0)
    return Choice.of(gates.T, options.most(len(logits)))


def few_rows_experts(
    operands: ExpertOperands, choice: Choice, options: Options
) -> Array:
    """Adds up the outputs of the chosen experts by their weights: [N, M]."""
    x, up, down, norm, residual, up_bias, down_bias = operands
    x, rows = normalised(x, norm, options.eps), len(x)
    wide = {"preferred_element_type": jnp.float32}

    def add(slot: Array, total: Array) -> Array:
        expert = choice.ids[slot]
        parts = jnp.dot(x, up[expert], **wide)
        if up_bias is not None:
            parts += up_bias[expert].astype(jnp.float32)[None]
        hidden = options.activate(*jnp.split(parts, options.num_parts, axis=1))
        gates = choice.gates[expert, :rows, None]
        # What a row does not choose adds nothing, were it infinite.
        hidden = jnp.where(gates == 0, 0.0, hidden * gates).astype(x.dtype)
        return total + jnp.dot(hidden, down[expert], **wide)

    total = jnp.zeros((rows, down.shape[2]), jnp.float32)
    # A loop, as a gather of matrices would copy all of them.
    total = lax.fori_loop(0, choice.count[0], add, total)
    if down_bias is not None:
        total += output_bias(choice, down_bias, rows)
    if residual is not None:
        total += residual.astype(jnp.float32)
    return total.astype(x.dtype)


def output_bias(choice: Choice, bias: Array, rows: int) -> Array:
    """Adds up the biases of each row's experts by their weights: float32[N, M]."""
    gates = choice.gates[: len(bias), :rows]
    bias = bias.astype(jnp.float32)
    return jnp.dot(gates.T, bias, precision=lax.Precision.HIGHEST)
