"""Router of a mixture of experts: the experts of each token, and their weights.

The router computes in float32, whatever the dtype of the model.

References: GShard, arXiv:2006.16668 (top-2); Switch, arXiv:2101.03961 (top-1);
DeepSpeed-MoE, arXiv:2201.05596 (random token selection); DeepSeek-V3,
arXiv:2412.19437, section 2.1.2 (sigmoid scores, a bias, groups); Zhou et al.,
arXiv:2202.09368 (expert choice); Rollout Routing
Replay, arXiv:2510.11370 (experts of a sampler).
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from zjax.errors import ConfigError, Problem
from zjax.moe.dispatch import Drop, keep_within_capacity
from zjax.ops import invariant as ordered
from zjax.ops.invariant_layers import sum_products
from zjax.ops.matmul import split_dot
from zjax.ops.tokens import ROUTED

_LEAST = 1e-18
"""Least divisor of scores: the square of the inverse is finite in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """Settings of a router.

    Args:
        num_experts: Number of experts to choose from, 1 or more.
        choice: Side that chooses. `tokens`: each token chooses `top_k` experts.
            `experts`: each expert takes the tokens with the best scores, as many as its
            capacity. The loss of a causal model then sees the future, as later tokens
            compete with earlier ones. `top_k`, `normalise`, groups, `sampling` and
            `drop` are not read.
        top_k: Number of experts of each token, 1 to `num_experts`.
        scores: Function from logits to scores: `softmax` over all experts, or `sigmoid`
            of each logit.
        normalise: Whether the weights of a token's kept experts add up to `scale`.
        scale: Factor of the weights.
        num_groups: Number of groups of adjacent experts; divides `num_experts`.
        top_groups: Number of groups that a token may choose from, 1 to `num_groups`:
            the groups with the largest sum of the two best scores.
        sampling: Choice that draws with Gumbel noise on the logits while training: the
            `first` choice (RSample), the `second`, or `none`.
        drop: Rule by which an expert above its capacity drops tokens; `none` drops
            none.
        capacity_factor: Ratio of an expert's capacity while training to its tokens at
            an even load; in expert choice the mean number of experts of a token.
        eval_capacity_factor: Ratio of an expert's capacity to an even load in
            evaluation.
        min_capacity: Least capacity, in tokens.
        invariant: Whether sums have one order, see `zjax.ops.invariant`.
    """

    num_experts: int
    choice: Literal["tokens", "experts"] = "tokens"
    top_k: int = 1
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    sampling: Literal["none", "first", "second"] = "none"
    drop: Drop = "none"
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    invariant: bool = False

    @property
    def num_choices(self) -> int:
        """Most experts of a token."""
        return self.num_experts if self.choice == "experts" else self.top_k

    @property
    def has_capacity(self) -> bool:
        """Whether the number of tokens of an expert is bounded."""
        return self.choice == "experts" or self.drop != "none"

    def capacity(self, num_tokens: int, *, is_training: bool) -> int:
        """Returns the most tokens that an expert takes.

        Args:
            num_tokens: Number of tokens that are routed together.
            is_training: Whether `capacity_factor` applies, or `eval_capacity_factor`.

        Raises:
            ConfigError: The capacity would be 0.
        """
        name = "capacity_factor" if is_training else "eval_capacity_factor"
        factor = getattr(self, name)
        choices = 1 if self.choice == "experts" else self.top_k
        even = math.ceil(num_tokens * choices * factor / self.num_experts)
        capacity = max(even, self.min_capacity)
        if capacity < 1:
            problem = f"with min_capacity={self.min_capacity} is a capacity of 0"
            raise ConfigError(Problem(name, factor, problem, "use more than 0"))
        return capacity


class RouterArrays(NamedTuple):
    """Parameters of a router.

    Args:
        kernel: Matrix [M, E].
        bias: Term of the scores for the choice alone, [E]; None for none.
        logit_bias: Term of the logits, [E]; None for none.
    """

    kernel: Any
    bias: Any = None
    logit_bias: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Experts and weights of each token.

    Args:
        experts: int32[T, K], distinct experts of each token, best first; in expert
            choice all experts in order, K = E.
        weights: float32[T, K]; 0 for an expert that dropped the token.
        kept: bool[T, K]; False for a dropped token and for padding.
        chosen: bool[T, K]; `kept` before dropping, or before experts choose.
        scores: float32[T, E], without bias and noise.
        logits: float32[T, E].
        capacity: Most tokens that an expert keeps; None without a bound. Static.
    """

    experts: Any
    weights: Any
    kept: Any
    chosen: Any
    scores: Any
    logits: Any
    capacity: int | None = dataclasses.field(default=None, metadata={"static": True})

    def only(self, tokens: Bool[Array, " T"]) -> "Routing":
        """Masks tokens, so that losses and metrics skip all other tokens."""
        chosen, kept = (x & tokens[:, None] for x in (self.chosen, self.kept))
        return dataclasses.replace(self, chosen=chosen, kept=kept)

    @property
    def shares(self) -> Float[Array, "T E"]:
        """Scores of each token divided by the sum; 0 where the scores underflow."""
        return self.scores / jnp.maximum(self.scores.sum(1, keepdims=True), _LEAST)

    @property
    def num_chosen(self) -> Int[Array, " E"]:
        """Tokens that chose each expert, including dropped tokens."""
        return count_tokens(self.experts, self.chosen, self.scores.shape[1])

    @property
    def num_kept(self) -> Int[Array, " E"]:
        """Tokens that each expert computes."""
        return count_tokens(self.experts, self.kept, self.scores.shape[1])


def router_logits(
    x: Float[Array, "T M"],
    kernel: Float[Array, "M E"],
    *,
    bias: Float[Array, " E"] | None = None,
    jitter: float = 0.0,
    key: jax.Array | None = None,
    invariant: bool = False,
) -> Float[Array, "T E"]:
    """Multiplies tokens by the router's matrix in float32.

    Args:
        x: Tokens.
        kernel: Matrix of the router.
        bias: Term of the logits; None for none.
        jitter: Half-width of the noise, 0 for none: entries of `x` are multiplied by
            uniform numbers from 1 - jitter to 1 + jitter.
        key: Random key; None means evaluation, without noise.
        invariant: Whether sums have one order.

    Reference:
        Switch, arXiv:2101.03961, section 2.4.
    """
    if jitter and key is not None:
        noise = jax.random.uniform(key, x.shape, minval=1 - jitter, maxval=1 + jitter)
        x = x.astype(jnp.float32) * noise
    multiply = _product_in_order if invariant else _product
    logits = multiply(x, kernel)
    return logits if bias is None else logits + bias.astype(jnp.float32)[None]


def _product_in_order(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies as `_product` does, with sums in one order."""
    return ordered.with_gradient_of(_product, sum_products)(x, kernel)


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies with float32 sums, in the fastest way that rounds no operand."""
    if x.dtype == jnp.bfloat16 and kernel.dtype in (jnp.bfloat16, jnp.float32):
        # A float32 kernel as bfloat16 terms: a fifth of the time, the same digits.
        return split_dot(x, kernel)
    if x.dtype != kernel.dtype:
        x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    # Products of two numbers of 16 bits are exact in float32, and fast.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, kernel, precision=precision, preferred_element_type=jnp.float32)


def route(
    logits: Float[Array, "T E"],
    router: Router,
    *,
    key: jax.Array | None = None,
    bias: Float[Array, " E"] | None = None,
    counts: Bool[Array, " T"] | None = None,
    given: Int[Array, "T K"] | None = None,
) -> Routing:
    """Chooses the experts of each token.

    Args:
        logits: Logits of each expert for each token.
        router: Settings.
        key: Random key; None means evaluation, without noise.
        bias: Term added to the scores for the choice, not for the weights.
        counts: Mask of the tokens to route; False for padding, which no expert
            computes. None routes all tokens.
        given: Experts of each token in place of the choice, such as those that a
            sampler chose, with K of `top_k`; -1 leaves the choice to the router. The
            weights are those of the logits. None leaves all choices to the router.

    Returns:
        Routing of the tokens. Gradients flow through the weights alone.

    Raises:
        ConfigError: The router has another number of experts than the logits, or fewer
            than a token chooses.
    """
    _check(router, logits.shape[1])
    logits = logits.astype(jnp.float32)
    scores = _score(logits, router)
    used = jnp.ones(len(logits), bool) if counts is None else counts
    capacity = None
    if router.has_capacity:
        capacity = router.capacity(len(logits), is_training=key is not None)
    if capacity is not None and router.choice == "experts":
        return _choose_tokens(logits, scores, router, used, capacity)
    noise, drop_key = (None, None) if key is None else jax.random.split(key)
    # Saved by name under remat policies: recomputation routes no token again.
    experts = _choose(logits, scores, router, noise, bias)
    if given is not None:
        experts = jnp.where(given < 0, experts, given.astype(experts.dtype))
    experts = checkpoint_name(experts, ROUTED)
    chosen = jnp.broadcast_to(used[:, None], experts.shape)
    own = jnp.take_along_axis(scores, experts, 1)
    kept = chosen
    if capacity is not None:
        # Evaluation draws no numbers: the first tokens stay.
        drop = "position" if router.drop == "random" and key is None else router.drop
        kept = keep_within_capacity(experts, own, chosen, capacity, drop, drop_key)
        kept = checkpoint_name(kept, ROUTED)
    # Weights are taken from the scores without bias and noise, as in DeepSeek-V3.
    weights = jnp.where(kept, own, 0)
    if router.normalise and router.top_k > 1:
        # A token that all experts dropped has weights of 0 / `_LEAST`, not 0 / 0.
        # `ordered.total` is of sums alone, and so has a gradient.
        total = ordered.total if router.invariant else _total
        weights /= jnp.maximum(total(weights)[:, None], _LEAST)
    weights *= router.scale
    return Routing(experts, weights, kept, chosen, scores, logits, capacity)


def _score(logits: jax.Array, router: Router) -> jax.Array:
    """Computes the scores of all experts from logits."""
    is_sigmoid = router.scores == "sigmoid"
    plain = jax.nn.sigmoid if is_sigmoid else jax.nn.softmax
    if not router.invariant:
        return plain(logits)
    in_order = ordered.sigmoid if is_sigmoid else ordered.softmax
    return ordered.with_gradient_of(plain, in_order)(logits)


def _total(weights: jax.Array) -> jax.Array:
    """Adds up the weights of each token."""
    return weights.sum(1)


def _check(router: Router, num_logits: int) -> None:
    """Refuses a router with numbers that contradict one another or the logits."""
    problems, number = [], router.num_experts
    if number != num_logits:
        problem = f"is not the number of logits of a token, {num_logits}"
        problems.append(Problem("num_experts", number, problem, f"use {num_logits}"))
    elif router.choice == "tokens" and number % router.num_groups:
        problem = f"does not divide {number} experts"
        problems.append(Problem("num_groups", router.num_groups, problem, "use 1"))
    elif router.choice == "tokens":
        most = number // router.num_groups * min(router.top_groups, router.num_groups)
        if not 1 <= router.top_k <= most:
            problem = f"is not a number of the {most} experts to choose from"
            problems.append(Problem("top_k", router.top_k, problem, f"use 1 to {most}"))
    if problems:
        raise ConfigError(*problems)


def _choose_tokens(
    logits: jax.Array,
    scores: jax.Array,
    router: Router,
    used: jax.Array,
    capacity: int,
) -> Routing:
    """Routes by expert choice; among equal scores the earlier token is taken."""
    num_tokens, num_experts = scores.shape
    ranked = jnp.where(used[:, None], scores, -1).T  # scores are above 0
    _, tokens = jax.lax.top_k(ranked, min(capacity, num_tokens))
    experts = jnp.broadcast_to(jnp.arange(num_experts), scores.shape)
    taken = jnp.zeros(ranked.shape, bool).at[experts[:1].T, tokens].set(True).T
    chosen = jnp.broadcast_to(used[:, None], scores.shape)
    kept = checkpoint_name(taken & chosen, ROUTED)
    weights = router.scale * jnp.where(kept, scores, 0)
    return Routing(experts, weights, kept, chosen, scores, logits, capacity)


def _choose(
    logits: jax.Array,
    scores: jax.Array,
    router: Router,
    key: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Returns the `top_k` experts of each token, with noise while training."""
    ranked = scores if bias is None else scores + bias[None]
    ranked = _within_groups(ranked, router)
    if key is None or router.sampling == "none":
        return jax.lax.top_k(ranked, router.top_k)[1]
    # The largest logit plus Gumbel noise is a draw from the softmax.
    noisy = logits + jax.random.gumbel(key, logits.shape)
    noisy = jnp.where(ranked == -jnp.inf, -jnp.inf, noisy)  # of other groups
    if router.sampling == "first":
        return jax.lax.top_k(noisy, router.top_k)[1]
    first = jnp.argmax(ranked, 1, keepdims=True)
    # The first choice has no noise, and must not be drawn twice.
    others = jnp.where(jnp.arange(logits.shape[1])[None] == first, -jnp.inf, noisy)
    rest = jax.lax.top_k(others, router.top_k - 1)[1]
    return jnp.concatenate([first.astype(rest.dtype), rest], 1)


def _within_groups(scores: jax.Array, router: Router) -> jax.Array:
    """Sets the scores of experts outside the best groups to -inf."""
    if router.num_groups == router.top_groups:
        return scores
    groups = scores.reshape(len(scores), router.num_groups, -1)
    # DeepSeek-V3 ranks groups by their two best scores.
    best = jax.lax.top_k(groups, min(2, groups.shape[2]))[0].sum(2)
    _, chosen = jax.lax.top_k(best, router.top_groups)
    is_chosen = (jnp.arange(router.num_groups)[None, None] == chosen[..., None]).any(1)
    return jnp.where(is_chosen[..., None], groups, -jnp.inf).reshape(scores.shape)


def count_tokens(
    experts: Int[Array, "T K"], which: Bool[Array, "T K"], num_experts: int
) -> Int[Array, " E"]:
    """Counts the choices of each expert for which the mask `which` is True."""
    ones = which.ravel().astype(jnp.int32)
    return jax.ops.segment_sum(ones, experts.ravel(), num_experts)
