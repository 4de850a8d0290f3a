"""Layers for Linen modules: mixtures of experts and sparse self-attention."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from zjax.models.layers import Dims
from zjax.models.mixture_settings import Mixture, initializer
from zjax.moe.experts import Activation
from zjax.moe.router import Router
from zjax.ops.sparse import Sparse
from zjax.ops.sparse_self import Mode, self_attention
from zjax.settings.schema import BalanceScope
from zjax_kernels import SparsityConfig


class MoE(nn.Module):
    """Experts that a router chooses for each token, in place of a feed-forward layer.

    The arguments are as of `zjax.nnx.MoE`, without `in_features` and `rngs`. While
    training, a router with noise or capacity draws from the stream `dropout`. The
    intermediate `chosen_experts`, int32[..., K], has the experts of each token in
    evaluation, best first, before any drop.

    Example:
        >>> import jax
        >>> from zjax.moe.router import Router
        >>> layer = MoE(Router(num_experts=4, top_k=2), 16)
        >>> (y, loss), _ = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8)))
        >>> y.shape, loss.shape
        ((2, 8), ())
    """

    router: Router
    expert_size: int
    activation: Activation = "swiglu"
    use_bias: bool = False
    jitter: float = 0.0
    balance_loss: float = 0.01
    balance_scope: BalanceScope = "microbatch"
    z_loss: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    deterministic: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "... M"],
        counts: Bool[Array, "..."] | None = None,
        *,
        deterministic: bool | None = None,
    ) -> tuple[Float[Array, "... M"], Float[Array, ""]]:
        """Transforms each token as `zjax.nnx.MoE` does; returns outputs and loss.

        Args:
            x: Tokens; the first dim is the batch.
            counts: False for padding, which no expert computes; None for no padding.
            deterministic: Replaces the attribute of the module unless None.

        Returns:
            The outputs, and the weighted sum of balance loss and z-loss, to add to the
            loss.

        Raises:
            ConfigError: Settings are out of range, or contradict other settings.
        """
        mixture = Mixture(
            router=self.router,
            expert_size=self.expert_size,
            activation=self.activation,
            use_bias=self.use_bias,
            jitter=self.jitter,
            balance_loss=self.balance_loss,
            balance_scope=self.balance_scope,
            z_loss=self.z_loss,
        )
        dims = mixture.dims(x.shape[-1])
        params = {name: self._param(name, given) for name, given in dims.items()}
        if deterministic is None:
            deterministic = self.deterministic
        draws = mixture.needs_key and not deterministic
        # A router without noise needs no stream: callers need not pass one.
        key = self.make_rng("dropout") if draws else None
        # Routing again costs a product: only for callers who ask.
        if self.is_mutable_collection("intermediates"):
            experts = mixture.chosen_experts(x, params)
            self.sow("intermediates", "chosen_experts", experts)
        return mixture.apply(x, params, counts, key, self.dtype)

    def _param(self, name: str, dims: Dims) -> Any:
        """Makes a parameter with logical names of dims."""
        names, sizes = zip(*dims, strict=True)
        init = nn.with_logical_partitioning(initializer(name, len(dims)), names)
        return self.param(name, init, sizes, self.param_dtype)


class SparseSelfAttention(nn.Module):
    """Block-sparse self-attention without parameters; replaces DeepSpeed's module.

    The arguments are as of `zjax.nnx.SparseSelfAttention`.

    Example:
        >>> import jax
        >>> from zjax_kernels import BigBird
        >>> x = jax.numpy.ones((1, 100, 4, 8))
        >>> SparseSelfAttention(BigBird(num_heads=4)).apply({}, x, x, x).shape
        (1, 100, 4, 8)

    Reference:
        DeepSpeed, `ops/sparse_attention/sparse_self_attention.py`.
    """

    sparsity_config: SparsityConfig
    key_padding_mask_mode: Mode = "add"
    attn_mask_mode: Mode = "mul"
    max_seq_length: int = 2048

    def __call__(
        self,
        query: Float[Array, "B S H D"],
        key: Float[Array, "B S K D"],
        value: Float[Array, "B S K D"],
        rpe: ArrayLike | None = None,
        key_padding_mask: ArrayLike | None = None,
        attn_mask: ArrayLike | None = None,
    ) -> Float[Array, "B S H D"]:
        """Attends as `zjax.nnx.SparseSelfAttention` does."""
        return self_attention(
            query,
            key,
            value,
            Sparse(self.sparsity_config, self.max_seq_length),
            rpe=rpe,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            key_padding_mask_mode=self.key_padding_mask_mode,
            attn_mask_mode=self.attn_mask_mode,
        )


__all__ = ["MoE", "SparseSelfAttention"]
