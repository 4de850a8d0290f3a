"""Rounds the matrices of experts, each by the tokens that a router sends there."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from zjax.compress.awq import awq_factors
from zjax.compress.block import RoundedBlock, round_matrix
from zjax.compress.folding import Arrays, divided
from zjax.compress.grid import Grid
from zjax.compress.statistics import Statistics, add_tokens, empty
from zjax.models.recording import Layer
from zjax.settings.compress import Awq, Method, Nearest
from zjax_kernels.grouped.reference import activate

_PIECE = 4096
"""Most tokens of an expert that are on the device at a time."""


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The matrices of the experts of a layer.

    Args:
        path: Path of the mixture in the parameters of the block.
        up: First matrices, with gates before values.
        down: Last matrices.
        activation: Name of the function between the two.
        grids: Grids of the first and the last matrices; None leaves them as they are.
    """

    path: str
    up: Layer
    down: Layer
    activation: str
    grids: tuple[Grid | None, Grid | None]

    def takes_factors(self, method: Method) -> bool:
        """Whether the values before the last matrices take up factors of inputs."""
        is_linear = self.activation == "swiglu" and self.grids[1] is not None
        return isinstance(method, Awq) and is_linear

    def without_factors(self, method: Method) -> list[str]:
        """Lists the layers whose inputs nothing before can divide."""
        both = zip((self.up.path, self.down.path), self.grids, strict=True)
        rounded = [path for path, grid in both if grid is not None]
        # What enters the first matrices also enters the router.
        takes = self.takes_factors(method)
        return [path for path in rounded if path != self.down.path or not takes]


class Routed(NamedTuple):
    """Tokens of all calibration rows that enter a mixture."""

    tokens: Shaped[np.ndarray, "T M"]
    experts: Int[np.ndarray, "T k"]
    """Experts of each token; -1 for none."""

    def of_expert(self, number: int) -> Shaped[np.ndarray, "t M"]:
        """Returns the tokens of one expert."""
        return self.tokens[(self.experts == number).any(axis=1)]


def round_experts(
    params: Arrays,
    mixture: Mixture,
    method: Method,
    routed: Routed | None,
    min_tokens: int,
) -> tuple[RoundedBlock, dict[int, int]]:
    """Rounds the matrices of each expert by statistics of the expert's own tokens.

    Args:
        params: Parameters of the block by path.
        mixture: Matrices and grids.
        method: Method of rounding.
        routed: Tokens and experts; None for round to nearest.
        min_tokens: Tokens that an expert needs; with fewer, its matrices are rounded to
            nearest.

    Returns:
        Parameters and scales of all experts, and the tokens of experts that saw too
        few, by number.
    """
    up = params[mixture.up.kernel]
    few, parts = dict[int, int](), list[_Expert]()
    for number in range(len(up)):
        found = (None, None)
        if routed is not None and method.calibrates:
            tokens = routed.of_expert(number)
            if len(tokens) < min_tokens:
                few[number] = len(tokens)
            else:
                found = _statistics_of(params, mixture, number, tokens)
        chosen = Nearest() if found[0] is None else method
        expert = _Expert.of(params, mixture, number)
        parts.append(_round_expert(expert, mixture, chosen, found))
    return _joined(params, mixture, parts), few


class _Expert(NamedTuple):
    """Matrices of one expert, [inputs, outputs], with scales if rounded."""

    up: Any
    down: Any
    up_bias: Any = None
    up_scales: Any = None
    down_scales: Any = None

    @classmethod
    def of(cls, params: Arrays, mixture: Mixture, number: int) -> "_Expert":
        """Selects an expert, with gates and values side by side."""
        up, down = (params[x.kernel][number] for x in (mixture.up, mixture.down))
        bias = params.get(f"{mixture.up.path}/bias")
        bias = None if bias is None else bias[number].reshape(-1)
        up, down = up.astype(jnp.float32), down.astype(jnp.float32)
        return cls(up.reshape(len(up), -1), down, bias)


def _statistics_of(
    params: Arrays, mixture: Mixture, number: int, tokens: np.ndarray
) -> tuple[Statistics, Statistics]:
    """Computes statistics of what enters both matrices of an expert."""
    expert = _Expert.of(params, mixture, number)
    found = empty(len(expert.up)), empty(len(expert.down))
    for start in range(0, len(tokens), _PIECE):
        piece = tokens[start : start + _PIECE]
        # Full pieces, so that experts with other numbers of tokens share a program.
        padded = np.zeros((_PIECE, tokens.shape[1]), tokens.dtype)
        padded[: len(piece)] = piece
        mask = np.arange(_PIECE) < len(piece)
        operands = expert.up, expert.up_bias, jnp.asarray(padded), jnp.asarray(mask)
        found = _add(found, *operands, activation=mixture.activation)
    return found


@functools.partial(jax.jit, static_argnames="activation")
def _add(
    found: tuple[Statistics, Statistics],
    up: Float[Array, "M F"],
    bias: Float[Array, " F"] | None,
    tokens: Float[Array, "T M"],
    mask: Shaped[Array, " T"],
    *,
    activation: str,
) -> tuple[Statistics, Statistics]:
    """Adds tokens to the statistics of both matrices of an expert."""
    hidden = jnp.matmul(tokens, up.astype(tokens.dtype))
    hidden = hidden if bias is None else hidden + bias.astype(hidden.dtype)[None]
    hidden = activate(activation, hidden).astype(tokens.dtype)
    return add_tokens(found[0], tokens, mask), add_tokens(found[1], hidden, mask)


def _round_expert(
    expert: _Expert,
    mixture: Mixture,
    method: Method,
    found: tuple[Statistics | None, Statistics | None],
) -> _Expert:
    """Rounds the matrices of one expert."""
    (first, last), (up_grid, down_grid) = found, mixture.grids
    if mixture.takes_factors(method) and last is not None:
        assert down_grid is not None
        factors = awq_factors(expert.down, last, down_grid)
        # Values stand behind the gates, and enter the product with them unchanged.
        both = jnp.concatenate([jnp.ones_like(factors), factors])
        bias = expert.up_bias
        expert = expert._replace(
            up=expert.up / both[None],
            down=expert.down * factors[:, None],
            up_bias=None if bias is None else bias / both,
        )
        last = divided(last, factors)
    if up_grid is not None:
        rounded = round_matrix(expert.up, up_grid, method, first)
        expert = expert._replace(up=rounded.values, up_scales=rounded.scales)
    if down_grid is not None:
        rounded = round_matrix(expert.down, down_grid, method, last)
        expert = expert._replace(down=rounded.values, down_scales=rounded.scales)
    return expert


def _joined(params: Arrays, mixture: Mixture, parts: Sequence[_Expert]) -> RoundedBlock:
    """Stacks experts to the parameters of the block."""
    changed, scales = dict(params), {}
    arrays = {
        mixture.up.kernel: [x.up for x in parts],
        mixture.down.kernel: [x.down for x in parts],
        f"{mixture.up.path}/bias": [x.up_bias for x in parts],
    }
    for path, each in arrays.items():
        if path in params:
            changed[path] = jnp.stack(each).reshape(params[path].shape)
    stacked = {
        mixture.up.kernel: [x.up_scales for x in parts],
        mixture.down.kernel: [x.down_scales for x in parts],
    }
    scales = {p: jnp.stack(x) for p, x in stacked.items() if x[0] is not None}
    return RoundedBlock(changed, scales)
