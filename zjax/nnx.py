"""Layers for NNX modules: mixtures of experts and sparse self-attention."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from zjax.models import layers
from zjax.models.mixture_settings import Mixture, initializer
from zjax.moe.experts import Activation
from zjax.moe.router import Router
from zjax.ops.sparse import Sparse
from zjax.ops.sparse_self import Mode, self_attention
from zjax.settings.schema import BalanceScope
from zjax_kernels import SparsityConfig


class MoE(nnx.Module):
    """Experts that a router chooses for each token, in place of a feed-forward layer.

    Args:
        in_features: Number of channels of a token.
        router: Settings, such as `Router(num_experts=8, top_k=2)`.
        expert_size: Number of hidden channels of an expert, 1 or more.
        activation: Name of the function between the two products of an expert.
        use_bias: Whether experts have biases.
        jitter: Half-width of the uniform noise, 1 - jitter to 1 + jitter, on the
            router's input while training.
        balance_loss: Coefficient of the loss that evens the load of the experts.
        balance_scope: Tokens with an even load: all of a device (`microbatch`), or of
            each entry of the first dim (`sequence`).
        z_loss: Coefficient of the squared log-sum-exp of the router's logits.
        dtype: Dtype of the experts' products; None promotes input and parameters. The
            router computes in float32.
        param_dtype: Dtype of the parameters.
        deterministic: Whether the router draws no numbers and uses the capacity of
            evaluation; `eval()` and `train()` set it.
        rngs: Source of the initial values, and of `dropout` keys while training.

    Raises:
        ConfigError: Settings are out of range, or contradict one another.

    Example:
        >>> from zjax.moe.router import Router
        >>> layer = MoE(8, Router(num_experts=4, top_k=2), 16, rngs=nnx.Rngs(0))
        >>> y, loss = layer(jnp.ones((2, 3, 8)))
        >>> y.shape, loss.shape
        ((2, 3, 8), ())

    References:
        Switch, arXiv:2101.03961; DeepSpeed-MoE, arXiv:2201.05596.
    """

    def __init__(
        self,
        in_features: int,
        router: Router,
        expert_size: int,
        activation: Activation = "swiglu",
        *,
        use_bias: bool = False,
        jitter: float = 0.0,
        balance_loss: float = 0.01,
        balance_scope: BalanceScope = "microbatch",
        z_loss: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        deterministic: bool = False,
        rngs: nnx.Rngs,
    ):
        self.mixture = Mixture(
            router=router,
            expert_size=expert_size,
            activation=activation,
            use_bias=use_bias,
            jitter=jitter,
            balance_loss=balance_loss,
            balance_scope=balance_scope,
            z_loss=z_loss,
        )
        self.dtype = dtype
        self.deterministic = deterministic
        # A stream is state that changes in calls: only modules with noise have one, or
        # with a capacity, for a key selects the capacity of training.
        self.rngs = rngs.dropout.fork() if self.mixture.needs_key else None

        def make(name: str, dims: layers.Dims) -> nnx.Param:
            init, key = initializer(name, len(dims)), rngs.params()
            return layers.make_param(dims, lambda shape: init(key, shape, param_dtype))

        dims = self.mixture.dims(in_features)
        self.names = tuple(dims)
        for name in self.names:
            setattr(self, name, make(name, dims[name]))

    def __call__(
        self, x: Float[Array, "... M"], counts: Bool[Array, "..."] | None = None
    ) -> tuple[Float[Array, "... M"], Float[Array, ""]]:
        """Transforms each token; returns outputs, and a loss to add to the model's.

        Args:
            x: Tokens; the first dim is the batch.
            counts: False for padding, which no expert computes; None for no padding.

        Returns:
            The outputs, and the weighted sum of balance loss and z-loss, float32[].

        Raises:
            ConfigError: There is no token, or shapes of arrays do not match.
        """
        key = None if self.rngs is None or self.deterministic else self.rngs()
        return self.mixture.apply(x, self._params(), counts, key, self.dtype)

    def chosen_experts(self, x: Float[Array, "... M"]) -> Int[Array, "... K"]:
        """Returns each token's experts in evaluation, best first, before any drop."""
        return self.mixture.chosen_experts(x, self._params())

    def _params(self) -> dict[str, Array]:
        return {name: getattr(self, name)[...] for name in self.names}


class SparseSelfAttention(nnx.Module):
    """Block-sparse self-attention without parameters; replaces DeepSpeed's module.

    Args:
        sparsity_config: Pattern of `zjax_kernels`, such as `BigBird(num_heads=4)`, or
            an array as `Custom(num_heads=4, live=...)`.
        key_padding_mask_mode: Form of `key_padding_mask`: `add` masks by -10000.0 and
            keeps by 0.0, `mul` by 0 and 1.
        attn_mask_mode: Form of `attn_mask`, `add` or `mul`.
        max_seq_length: Number of tokens of the layout, 1 or more; shorter sequences use
            the first blocks, and need not be whole blocks.

    Example:
        >>> import jax
        >>> from zjax_kernels import BigBird
        >>> x = jax.numpy.ones((1, 100, 4, 8))
        >>> SparseSelfAttention(BigBird(num_heads=4))(x, x, x).shape
        (1, 100, 4, 8)

    Reference:
        DeepSpeed, `ops/sparse_attention/sparse_self_attention.py`.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: Mode = "add",
        attn_mask_mode: Mode = "mul",
        max_seq_length: int = 2048,
    ):
        self.sparse = Sparse(sparsity_config, max_seq_length)
        self.key_padding_mask_mode: Mode = key_padding_mask_mode
        self.attn_mask_mode: Mode = attn_mask_mode

    def __call__(
        self,
        query: Float[Array, "B S H D"],
        key: Float[Array, "B S K D"],
        value: Float[Array, "B S K D"],
        rpe: ArrayLike | None = None,
        key_padding_mask: ArrayLike | None = None,
        attn_mask: ArrayLike | None = None,
    ) -> Float[Array, "B S H D"]:
        """Computes softmax(q k / sqrt(D)) v over the keys in live blocks.

        Args:
            query: [B, S, H, D] queries; H is the number of heads of the pattern.
            key: [B, S, K, D] keys; K divides H.
            value: [B, S, K, D] values.
            rpe: Relative position bias; refused.
            key_padding_mask: [B, S] or [B, 1, 1, S] mask of keys. If it is traced, a
                number that is neither 0 nor masks under `add` makes its row NaN.
            attn_mask: [S, S] mask of pairs, a concrete array such as NumPy's.

        Returns:
            [B, S, H, D], 0 where a query sees no key.

        Raises:
            NotImplementedError: `rpe` is given, or `attn_mask` is traced.
            ConfigError: A setting, a shape or a mask is unusable, or the sequence is
                longer than `max_seq_length`.
        """
        return self_attention(
            query,
            key,
            value,
            self.sparse,
            rpe=rpe,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            key_padding_mask_mode=self.key_padding_mask_mode,
            attn_mask_mode=self.attn_mask_mode,
        )


__all__ = ["MoE", "SparseSelfAttention"]
