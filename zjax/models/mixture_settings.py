"""Settings, parameters and computation shared by the Linen and NNX mixtures."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zjax.errors import ConfigError, Problem
from zjax.models.layers import Dims
from zjax.models.mixture import ROUTER_INIT, chosen_experts, mix_tokens
from zjax.moe.experts import Activation, Experts
from zjax.moe.router import Router, RouterArrays
from zjax.parallel import tensor
from zjax.settings import choices, convert, schema
from zjax.settings.mixture import routing_problems
from zjax.settings.ranges import range_problems
from zjax_kernels.grouped.reference import num_parts

_SECTIONS: dict[str, type[schema.MoE]] = {
    "tokens": schema.TokenChoice,
    "experts": schema.ExpertChoice,
}
"""Sections of a built-in model, by `Router.choice`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Settings of a mixture of experts in a Flax model.

    Args:
        expert_size: Number of hidden channels of an expert, 1 or more.
        activation: Name of the function between the two products of an expert.
        use_bias: Whether experts have biases.
        jitter: Half-width of the noise on the router's input while training.
        balance_loss: Coefficient of the balance loss.
        balance_scope: Scope within which the load is evened.
        z_loss: Coefficient of the z-loss.

    Raises:
        ConfigError: Settings are out of range, or contradict one another.
    """

    router: Router
    expert_size: int
    activation: Activation
    use_bias: bool
    jitter: float
    balance_loss: float
    balance_scope: schema.BalanceScope
    z_loss: float

    def __post_init__(self):
        problems = list(router_problems(self.router))
        if problems:
            raise ConfigError(*problems)
        sizes = {"num_experts": self.router.num_experts}
        sizes["expert_size"] = self.expert_size
        problems = [*_size_problems(sizes), *activation_problems(self.activation)]
        problems += _unread_problems(self.router)
        # Each check needs values that the check before has accepted.
        problems = problems or list(range_problems(self.moe))
        problems = problems or list(map(_without_path, routing_problems(self.moe)))
        if problems:
            raise ConfigError(*problems)

    @functools.cached_property
    def moe(self) -> schema.MoE:
        """Settings in the form of a built-in model."""
        section = _SECTIONS[self.router.choice]
        names, values = choices.names(section), {**vars(self), **vars(self.router)}
        values = {name: x for name, x in values.items() if name in names}
        return convert.from_mapping(section, values)

    @property
    def needs_key(self) -> bool:
        """Whether training draws random numbers or has a capacity."""
        has_noise = self.jitter > 0 or self.router.sampling != "none"
        return has_noise or self.router.has_capacity

    def dims(self, embed_size: int) -> dict[str, Dims]:
        """Returns names and sizes of the dims of each parameter."""
        number = self.router.num_experts
        experts: Dims = (("experts", number),)
        embed: Dims = (("embed", embed_size),)
        mlp: Dims = (("mlp", self.expert_size),)
        hidden = (("gates", 2), *mlp) if num_parts(self.activation) == 2 else mlp
        dims: dict[str, Dims] = {
            "router_kernel": (*embed, (None, number)),
            "up": (*experts, *embed, *hidden),
            "down": (*experts, *mlp, *embed),
        }
        if self.use_bias:
            dims |= {"up_bias": (*experts, *hidden), "down_bias": (*experts, *embed)}
        return dims

    def apply(
        self,
        x: Float[Array, "... M"],
        params: dict[str, Array],
        counts: Bool[Array, "..."] | None,
        key: jax.Array | None,
        dtype: Any,
    ) -> tuple[Float[Array, "... M"], Float[Array, ""]]:
        """Returns outputs and weighted loss; a dtype of None promotes all operands."""
        params = dict(params)
        router = params.pop("router_kernel")
        problems = list(input_problems(x, counts, len(router)))
        if problems:
            raise ConfigError(*problems)
        dtype = dtype or jnp.result_type(x, *params.values())
        # Balance per sequence takes the first dim as sequences.
        num_rows = x.shape[0] if x.ndim > 1 else 1
        tokens = x.astype(dtype).reshape(num_rows, -1, x.shape[-1])
        if self.balance_scope != "microbatch":
            _check_whole_sequences(tokens, self.balance_scope)
        cast: dict[str, Any] = {name: p.astype(dtype) for name, p in params.items()}
        y, auxiliary = mix_tokens(
            tokens,
            RouterArrays(router),
            Experts(**cast).with_merged_gates(),
            self.router,
            self.moe,
            activation=self.activation,
            counts=None if counts is None else counts.reshape(tokens.shape[:2]),
            key=key,
        )
        loss: Any = auxiliary.loss
        return y.reshape(x.shape), loss

    def chosen_experts(
        self, x: Float[Array, "... M"], params: dict[str, Array]
    ) -> Int[Array, "... K"]:
        """Returns each token's experts in evaluation, best first, before any drop."""
        return chosen_experts(x, RouterArrays(params["router_kernel"]), self.router)


def initializer(name: str, num_dims: int) -> jax.nn.initializers.Initializer:
    """Returns the initialiser of a parameter of `Mixture.dims`."""
    if name == "router_kernel":
        return ROUTER_INIT
    if name.endswith("bias"):
        return jax.nn.initializers.zeros
    # Dim 0 are experts: the variance follows from the inputs of one expert.
    return jax.nn.initializers.lecun_normal(1, tuple(range(2, num_dims)), 0)


def _check_whole_sequences(
    tokens: Float[Array, "B L M"], scope: schema.BalanceScope
) -> None:
    """Refuses balance by sequence on a mesh that splits sequences."""
    axes = tensor.axes_of_length(tokens)
    if axes:
        problem = (
            f"cannot run on a mesh whose axes {' and '.join(axes)} split the tokens"
        )
        problem += " of a sequence"
        remedy = "use 'microbatch', or size 1"
        raise ConfigError(Problem("balance_scope", scope, problem, remedy))


def _size_problems(sizes: dict[str, Any]) -> Iterator[Problem]:
    """Yields a problem for each size that is no positive int."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            yield Problem(name, size, "is not a size", "use 1 or more")


def input_problems(x: Any, counts: Any, embed_size: int) -> Iterator[Problem]:
    """Yields a problem if `x` are not tokens, or `counts` is not a bool per token."""
    if x.ndim == 0 or x.shape[-1] != embed_size:
        problem, remedy = f"is not tokens of {embed_size} channels", "end it with them"
        yield Problem("x.shape", x.shape, problem, remedy)
    elif not x.size:
        yield Problem("x.shape", x.shape, "has no token", "give one or more")
    if counts is not None and (counts.shape, counts.dtype) != (x.shape[:-1], bool):
        found = f"{counts.dtype.name}{list(counts.shape)}"
        problem, remedy = "does not mark the tokens", f"give bool{list(x.shape[:-1])}"
        yield Problem("counts", found, problem, remedy)


def router_problems(router: Any) -> Iterator[Problem]:
    """Yields a problem if the settings of the router are no `Router`."""
    if not isinstance(router, Router):
        remedy = "give zjax.moe.router.Router(num_experts=8)"
        yield Problem("router", router, "is not a Router", remedy)


def _unread_problems(router: Router) -> Iterator[Problem]:
    """Yields changed settings of a router that its side of choice does not read."""
    read = choices.names(_SECTIONS[router.choice])
    unread = [x for x in choices.names(schema.TokenChoice) if x not in read]
    for name in (x for x in unread if hasattr(router, x)):
        value, default = getattr(router, name), choices.default_of(Router, name)
        if value != default:
            problem = f"has no effect with choice={router.choice!r}"
            remedy = f"leave it at {default!r}, or set choice"
            yield Problem(name, value, problem, remedy)


def activation_problems(activation: Any) -> Iterator[Problem]:
    """Yields a problem if the activation is none of experts."""
    names = get_args(Activation)
    if activation not in names:
        remedy = f"use one of {', '.join(names)}"
        yield Problem("activation", activation, "is not an activation", remedy)


def _without_path(problem: Problem) -> Problem:
    """Renames a problem of `model.moe` to the names of arguments."""
    texts = (problem.field, problem.problem, problem.remedy)
    field, text, remedy = (x.replace("model.moe.", "") for x in texts)
    return Problem(field, problem.value, text, remedy)
