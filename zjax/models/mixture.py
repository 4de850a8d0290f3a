"""Mixture of experts in place of a feed-forward layer.

References: Switch, arXiv:2101.03961; DeepSpeed-MoE, arXiv:2201.05596; DeepSeekMoE,
arXiv:2401.06066 (shared experts).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from zjax.models import layers
from zjax.models.feed_forward import FeedForward
from zjax.moe import balance
from zjax.moe.dispatch import Placement
from zjax.moe.experts import Activation, Experts, apply_experts
from zjax.moe.few_rows import (
    MAX_ROWS,
    chooses_in_kernel,
    chosen_by,
    mix_few_rows,
    router_kernel,
)
from zjax.moe.few_rows import Activation as FewRowsActivation
from zjax.moe.in_order import apply_experts_in_order
from zjax.moe.router import Router, RouterArrays, Routing, route, router_logits
from zjax.ops import rounding
from zjax.ops.keys import fold_in
from zjax.parallel import tensor
from zjax.settings import schema
from zjax.settings.quantize import Rule
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import first_row, open_size
from zjax.typing import Auxiliary, RecordExperts

ROUTER_INIT = jax.nn.initializers.variance_scaling(0.1, "fan_in", "truncated_normal")
"""Switch's initialiser, with a tenth of the usual variance."""


class Matrix(nnx.Module):
    """Matrix, or one per expert, with an optional bias, initially 0."""

    def __init__(self, kernel: layers.Dims, initial: Any, bias: layers.Dims = ()):
        self.kernel = layers.make_param(kernel, initial)
        self.bias = layers.make_param(bias, jnp.zeros) if bias else None
        self.num_inputs, self.num_outputs = 1, len(kernel) - 2
        self.rounding: Rule | None = None
        """Codes to whose values the kernel of each expert is rounded."""

    def rounded(self, kernel: Float[Array, "E ..."]) -> Float[Array, "E ..."]:
        """Rounds the kernels of all experts, if the layer has a rule."""
        if self.rounding is None:
            return kernel
        return rounding.rounded_kernel(kernel, self.rounding, self.num_outputs, 1)


class RouterMatrix(nnx.Module):
    """Parameters of a router."""

    def __init__(
        self, embed_size: int, moe: schema.MoE, num_experts: int, *, rngs: nnx.Rngs
    ):
        key = rngs.params()
        experts: layers.Dims = ((None, num_experts),)
        # None where `laid` is in use.
        self.kernel: Any = layers.make_param(
            (("embed", embed_size), *experts),
            lambda shape: ROUTER_INIT(key, shape),
        )
        has_bias = moe.has_choice_bias
        self.bias = layers.make_param(experts, jnp.zeros) if has_bias else None
        self.logit_bias = (
            layers.make_param(experts, jnp.zeros) if moe.router_bias else None
        )
        self.embed_size, self.num_experts = embed_size, num_experts
        self.laid: Any = nnx.data(None)  # the kernel for few rows, see `lay`

    def lay(self) -> None:
        """Gives abstract parameters a kernel of `lay_router` in place of `kernel`."""
        # A placeholder: parameters come when the module is made from its form.
        self.laid = nnx.data(nnx.Param(jax.ShapeDtypeStruct((), jnp.float32)))
        self.kernel = nnx.data(None)

    def values(self, *, few_rows: bool = False) -> RouterArrays:
        """Returns the parameters in the form that `mix_tokens` reads.

        With `few_rows` the kernel is laid for `mix_few_rows`, if it is.
        """
        bias, logit_bias = self.bias, self.logit_bias
        if self.laid is None:
            kernel = self.kernel[...]
        else:
            laid = self.laid[...]
            sizes = self.embed_size, self.num_experts
            kernel = laid if few_rows else router_kernel(laid, *sizes)
        return RouterArrays(
            kernel,
            None if bias is None else bias[...],
            None if logit_bias is None else logit_bias[...],
        )


class ExpertMatrices(nnx.Module):
    """Parameters of all experts."""

    def __init__(
        self,
        config: schema.Model,
        expert_size: int,
        num_experts: int,
        *,
        out_std: float,
        rngs: nnx.Rngs,
    ):
        experts: layers.Dims = (("experts", num_experts),)
        embed: layers.Dims = (("embed", config.embed_size),)
        mlp: layers.Dims = (("mlp", expert_size),)
        # Gates and values have a dim, so that the tensor axis splits both equally.
        hidden = (("gates", 2), *mlp) if config.is_gated else mlp

        def matrix(inputs: layers.Dims, outputs: layers.Dims, std: float) -> Matrix:
            bias = (*experts, *outputs) if config.use_bias else ()
            normal = layers.make_normal(rngs.params(), std)
            return Matrix((*experts, *inputs, *outputs), normal, bias)

        self.up = matrix(embed, hidden, layers.INIT_STD)
        self.down = matrix(mlp, embed, out_std)

    def values(self) -> Experts:
        """Returns the parameters in the form that `apply_experts` reads."""
        up, down = (x.rounded(x.kernel[...]) for x in (self.up, self.down))
        up_bias = down_bias = None
        if self.up.bias is not None and self.down.bias is not None:
            up_bias, down_bias = self.up.bias[...], self.down.bias[...]
        return Experts(up, down, up_bias, down_bias).with_merged_gates()


class MixtureOfExperts(nnx.Module):
    """Experts that a router chooses for each token; shared and residual branches.

    The total `load` counts, for each expert, the tokens that chose the expert, or under
    expert choice the tokens that the expert computes.
    """

    def __init__(
        self,
        config: schema.Model,
        moe: schema.MoE,
        num_experts: int,
        *,
        out_std: float,
        matmul_dtype: layers.MatmulDtype = "compute",
        rngs: nnx.Rngs,
    ):
        def feed_forward(size: int) -> FeedForward:
            return FeedForward(
                dataclasses.replace(config, mlp_size=int(size)),
                out_std=out_std,
                matmul_dtype=matmul_dtype,
                rngs=rngs,
            )

        def linear(size: int, use_bias: bool) -> layers.Linear:
            return layers.Linear(embed, ((None, size),), use_bias=use_bias, rngs=rngs)

        embed, size = (("embed", config.embed_size),), moe.expert_size
        self.config, self.moe = config, moe
        self.settings = router_of(moe, num_experts)
        self.router = RouterMatrix(config.embed_size, moe, num_experts, rngs=rngs)
        self.experts = ExpertMatrices(
            config, size, num_experts, out_std=out_std, rngs=rngs
        )
        shared, residual = moe.num_shared, moe.residual
        self.shared = feed_forward(shared * size) if shared else None
        self.shared_gate = linear(1, use_bias=False) if moe.shared_gate else None
        self.residual = feed_forward(size) if residual else None
        self.coefficient = linear(2, use_bias=True) if residual else None
        self.invariant = False
        """Whether sums have one order, see `zjax.ops.invariant`."""
        self.streams = False
        """Whether few tokens meet the experts, as in the decoding of text."""
        self.defers = False
        """Whether the experts run when they are added to the stream."""
        self.on_input: Callable[[Any], RecordExperts] | None = None
        """Function of the tokens that returns a function to tell of the experts."""

    def stream(self, *, fuses: bool) -> None:
        """Prepares abstract experts for few tokens of a decoder that writes text.

        With `fuses`, the caller adds the result to the stream, with nothing between.
        """
        settings = self.settings
        # Experts of other devices would need an exchange of tokens.
        if open_size(meshes.EXPERT) > 1 or settings.choice == "experts":
            return
        self.streams = True
        if chooses_in_kernel(settings):
            self.router.lay()
        self.defers = fuses and self._has_no_branch

    @property
    def takes_norm(self) -> bool:
        """Whether nothing but the router's and the experts' kernels reads tokens."""
        return self.router.laid is not None and self._has_no_branch

    @property
    def _has_no_branch(self) -> bool:
        return self.shared is None and self.residual is None

    def __call__(
        self,
        x: Float[Array, "B L M"] | layers.Normalized,
        counts: Bool[Array, "B L"] | None = None,
        key: jax.Array | None = None,
        *,
        trained: Bool[Array, "B L"] | None = None,
        given: Int[Array, "B L K"] | None = None,
        drops: bool = True,
        adapter_dropout: layers.AdapterDropout | None = None,
        record: RecordExperts | None = None,
    ) -> tuple[Any, Auxiliary]:
        """Transforms each token; returns outputs, and losses, metrics and load.

        `counts` is False for padding, which no expert computes. `trained` is False for
        tokens that losses, metrics and load leave out. Experts `given` take the place
        of the router's choice, except -1. A key of None means evaluation. Few tokens
        have no losses, metrics and load. `record` is told the experts of each token.
        """
        if self.streams:
            rows = x.x if isinstance(x, layers.Normalized) else x
            if rows.size // rows.shape[-1] <= MAX_ROWS:
                return self._mix_few_rows(x, counts, record), Auxiliary()
            x = x.apply() if isinstance(x, layers.Normalized) else x
        assert not isinstance(x, layers.Normalized)
        if self.on_input is not None:
            record = self.on_input(x)
        settings = dataclasses.replace(self.settings, invariant=self.invariant)
        if not drops:
            settings = dataclasses.replace(settings, drop="none")

        activation = self.config.activation
        # The rules of `settings.attention` refuse other activations.
        assert activation in ("swiglu", "clamped_swiglu", "gelu")
        y, auxiliary = mix_tokens(
            x,
            self.router.values(),
            self.experts.values(),
            settings,
            self.moe,
            activation=activation,
            counts=counts,
            trained=trained,
            given=given,
            key=key,
            record=record,
        )
        return self._add_branches(x, y, adapter_dropout), auxiliary

    def _mix_few_rows(
        self, x: Any, counts: jax.Array | None, record: RecordExperts | None
    ) -> Any:
        """Transforms few tokens, by kernels that read the chosen experts alone."""
        activation = self.config.activation
        assert activation in ("swiglu", "clamped_swiglu", "gelu")
        norm = None
        if isinstance(x, layers.Normalized):
            x, norm = x.x, (x.scale, x.eps)
        run = functools.partial(
            mix_few_tokens,
            x,
            self.router.values(few_rows=True),
            self.experts.values(),
            dataclasses.replace(self.settings, drop="none"),
            activation=activation,
            counts=counts,
            norm=norm,
            record=record,
        )
        return Deferred(run) if self.defers else self._add_branches(x, run(), None)

    def chosen_experts(self, x: Float[Array, "... M"]) -> Int[Array, "... K"]:
        """Returns each token's experts in evaluation, best first, before any drop."""
        settings = dataclasses.replace(self.settings, invariant=self.invariant)
        return chosen_experts(x, self.router.values(), settings)

    def _add_branches(
        self, x: jax.Array, y: jax.Array, adapter_dropout: Any
    ) -> jax.Array:
        """Adds the shared feed-forward, and mixes in the residual one."""
        how = {"adapter_dropout": adapter_dropout}
        if self.residual is not None and self.coefficient is not None:
            logits = self.coefficient(x, **how).astype(jnp.float32)
            # Branches are weighted in float32 and added in the dtype of the stream.
            of_experts, of_mlp = jnp.split(jax.nn.softmax(logits), 2, axis=-1)
            mlp = self.residual(x, **how)
            y = (of_experts * y + of_mlp * mlp).astype(x.dtype)
        if self.shared is not None:
            shared = self.shared(x, **how)
            if self.shared_gate is not None:
                gate = self.shared_gate(x, **how)
                gate = jax.nn.sigmoid(gate.astype(jnp.float32))
                shared = (gate * shared).astype(x.dtype)
            y = layers.adder(invariant=self.invariant)(y, shared)
        return y


def mix_tokens(
    x: Float[Array, "B L M"],
    router: RouterArrays,
    experts: Experts,
    settings: Router,
    moe: schema.MoE,
    *,
    activation: Activation,
    counts: Bool[Array, "B L"] | None = None,
    trained: Bool[Array, "B L"] | None = None,
    given: Int[Array, "B L K"] | None = None,
    key: jax.Array | None = None,
    record: RecordExperts | None = None,
) -> tuple[Float[Array, "B L M"], Auxiliary]:
    """Routes each device's tokens; masks and results are as of `MixtureOfExperts`."""
    placement = Placement.of(settings.num_experts, experts.down.shape[1])

    def run(x: jax.Array, masks: Any, weights: Any, shard: Any) -> tuple[Any, Any]:
        router, experts, key = weights
        counts, trained, given = masks
        experts = experts.joined(placement)
        tokens = x.reshape(-1, x.shape[-1])
        # Devices with other rows, or other shards of the rows, draw other noise.
        noise = fold_in(fold_in(key, first_row(len(x))), shard)
        routing = _route(tokens, router, settings, moe, counts, noise, given)
        apply = apply_experts_in_order if settings.invariant else apply_experts
        y = apply(tokens, experts, routing, activation=activation)
        if trained is not None:
            # After the experts: untrained tokens are computed, and only not measured.
            routing = routing.only(trained.ravel())
        chosen = routing.experts if record else None
        return _results(x, y, chosen, settings), _measure(routing, moe, len(x))

    parts, specs = experts.parted(placement)
    weights, specs = (router, parts, key), (P(), specs, P())
    masks = counts, trained, given
    (y, *chosen), numbers = tensor.map_tokens(run, x, masks, weights, specs)
    if record:
        record(*chosen)
    return y, _auxiliary(numbers, moe)


def _results(
    x: jax.Array, y: jax.Array, experts: Any, settings: Router
) -> tuple[jax.Array, ...]:
    """Shapes sums, and experts unless None, of tokens as the stream `x`."""
    y = y.reshape(x.shape)
    if experts is None:
        return (y,)
    dtype = jnp.uint8 if settings.num_experts <= 256 else jnp.int16
    return y, experts.astype(dtype).reshape(*x.shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class Deferred:
    """Experts that run when they are added to the stream.

    Args:
        run: Function from `residual`, the stream, to the sum.
    """

    run: Callable[..., jax.Array]

    def __radd__(self, stream: jax.Array) -> jax.Array:
        """Adds the outputs of the experts to the stream."""
        return self.run(residual=stream)


def mix_few_tokens(
    x: Float[Array, "B L M"],
    router: RouterArrays,
    experts: Experts,
    settings: Router,
    *,
    activation: FewRowsActivation,
    counts: Bool[Array, "B L"] | None = None,
    norm: tuple[jax.Array, float] | None = None,
    residual: Float[Array, "B L M"] | None = None,
    record: RecordExperts | None = None,
) -> Float[Array, "B L M"]:
    """Applies `mix_few_rows` to each device's tokens, with the device's channels."""
    placement = Placement.of(settings.num_experts, experts.down.shape[1])

    def run(x: jax.Array, masks: Any, weights: Any, shard: Any) -> tuple[Any, Any]:
        del shard
        (counts, residual), (router, experts, scale) = masks, weights
        rows = x.reshape(-1, x.shape[-1])
        y, choice = mix_few_rows(
            rows,
            router,
            experts.joined(placement),
            settings,
            activation=activation,
            token_mask=None if counts is None else counts.reshape(-1),
            norm=None if norm is None else (scale, norm[1]),
            residual=None if residual is None else residual.reshape(rows.shape),
        )
        chosen = chosen_by(choice, settings, len(rows)) if record else None
        return _results(x, y, chosen, settings), ()

    parts, specs = experts.parted(placement)
    weights = router, parts, None if norm is None else norm[0]
    masks, specs = (counts, residual), (P(), specs, P())
    (y, *chosen), _ = tensor.map_tokens(run, x, masks, weights, specs)
    if record:
        record(*chosen)
    return y


def chosen_experts(
    x: Float[Array, "... M"],
    router: RouterArrays,
    settings: Router,
) -> Int[Array, "... K"]:
    """Returns each token's experts in evaluation, best first, before any drop.

    In expert choice the tokens of `x` compete, and entry e is e, or -1 if expert e did
    not choose the token.
    """
    how = {"bias": router.logit_bias, "invariant": settings.invariant}
    logits = router_logits(x.reshape(-1, x.shape[-1]), router.kernel, **how)
    routing = route(logits, settings, bias=router.bias)
    experts = routing.experts
    if settings.choice == "experts":
        experts = jnp.where(routing.kept, experts, -1)
    return experts.reshape(*x.shape[:-1], -1)


def router_of(moe: schema.MoE, num_experts: int) -> Router:
    """Makes the settings of the router of a layer."""
    names = {field.name for field in dataclasses.fields(Router)} - {"num_experts"}
    values = {name: x for name, x in vars(moe).items() if name in names}
    choice = "tokens" if isinstance(moe, schema.TokenChoice) else "experts"
    return Router(num_experts=num_experts, choice=choice, **values)


def _route(
    tokens: jax.Array,
    router: RouterArrays,
    settings: Router,
    moe: schema.MoE,
    counts: jax.Array | None,
    key: jax.Array | None,
    given: jax.Array | None,
) -> Routing:
    """Computes logits and routes tokens, with noise while training."""
    jitter_key, route_key = (None, None) if key is None else jax.random.split(key)
    kernel, bias, logit_bias = router
    how = {"bias": logit_bias, "jitter": moe.jitter, "key": jitter_key}
    logits = router_logits(tokens, kernel, **how, invariant=settings.invariant)
    flat = None if counts is None else counts.ravel()
    if given is not None:
        given = given.reshape(len(tokens), -1)
    return route(logits, settings, key=route_key, bias=bias, counts=flat, given=given)


def _measure(routing: Routing, moe: schema.MoE, num_rows: int) -> dict[str, jax.Array]:
    """Computes losses, metrics and load of a device, and the number of tokens."""
    counts = routing.chosen[:, 0].astype(jnp.float32)
    num_tokens = jnp.maximum(counts.sum(), 1)
    shares = routing.shares
    entropy = -jnp.sum(jax.scipy.special.xlogy(shares, shares), axis=1)  # 0 log 0 is 0
    chosen, kept = routing.num_chosen, routing.num_kept
    # At least one token in all: padding alone must not give 0 / 0.
    mean_load = jnp.maximum(chosen.mean(), 1 / len(chosen))
    numbers = {
        "num_tokens": counts.sum(),
        "router_z_loss": balance.z_loss(routing),
        "router_entropy": (counts * entropy).sum() / num_tokens,
    }
    if not isinstance(moe, schema.TokenChoice):
        has_expert = routing.kept.any(1).sum()
        unchosen = 1 - has_expert / num_tokens
        return numbers | {"unchosen_fraction": unchosen, "load": kept}
    sequences = 1 if moe.balance_scope == "microbatch" else num_rows
    # DeepSpeed's and GShard's loss of two choices counts the first one alone.
    return numbers | {
        "balance_loss": balance.balance_loss(
            routing, choices=1 if moe.top_k == 2 else 0, num_sequences=sequences
        ),
        "dropped_fraction": 1 - kept.sum() / jnp.maximum(chosen.sum(), 1),
        "max_load": chosen.max() / mean_load,
        "load": chosen,
    }


def _auxiliary(numbers: dict[str, jax.Array], moe: schema.MoE) -> Auxiliary:
    """Combines the numbers of all devices to losses, metrics and load."""
    # Means by tokens, since devices may hold different numbers of them.
    load, weights = numbers.pop("load").sum(0), numbers.pop("num_tokens")
    total = jnp.maximum(weights.sum(), 1)
    means = {name: (weights * x).sum() / total for name, x in numbers.items()}
    loss = moe.z_loss * means["router_z_loss"]
    if isinstance(moe, schema.TokenChoice):
        loss += moe.balance_loss * means["balance_loss"]
    # Only the loss has a gradient: the means are metrics.
    return Auxiliary(loss, jax.lax.stop_gradient(means), {"load": load})
