"""An encoder in the form of BERT, trained to restore masked tokens.

Devlin et al. (arXiv:1810.04805), without next-sentence prediction.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zjax.config import schema
from zjax.models import layers
from zjax.models.block import Block
from zjax.models.embedding import Embedding
from zjax.models.heads import Head
from zjax.models.segments import make_segments
from zjax.models.stack import hidden_states
from zjax.promotion import dtype_promotion


class Encoder(nnx.Module):
    """A bidirectional masked language model.

    Weights are initialised normally with deviation 0.02, biases with 0, scales with 1.

    Args:
        config: Shape of the model.
        use_pooling: Whether to create the layer of `pool`.
        matmul_dtype: Dtype of the operands of the blocks' matrix products.
        deterministic: Whether embedding gradients are summed in a fixed order.
        only_layer: Index of the only layer to initialise; None means all layers.
        rngs: Source of the initial values.

    Example:
        >>> config = schema.Model(kind="encoder", num_layers=1, embed_size=8,
        ...                       mlp_size=16, num_heads=2, num_kv_heads=2,
        ...                       vocab_size=11, max_length=4)
        >>> encoder = Encoder(config, rngs=nnx.Rngs(0))
        >>> encoder({"tokens": jnp.array([[3, 1, 4]])}).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        config: schema.Model,
        *,
        use_pooling: bool = False,
        matmul_dtype: layers.MatmulDtype = "compute",
        deterministic: bool = False,
        only_layer: jax.Array | None = None,
        rngs: nnx.Rngs,
    ):
        def make_block(rngs: nnx.Rngs, num_experts: int, slides: bool) -> Block:
            return Block(
                config,
                num_experts=num_experts,
                causal=False,
                norm_position="stream",
                matmul_dtype=matmul_dtype,
                rngs=rngs,
            )

        embed: layers.Dims = (("embed", config.embed_size),)
        self.config = config
        self.embedding = Embedding(
            config,
            use_norm=True,
            deterministic=deterministic,
            rngs=rngs,
        )
        self.blocks = make_segments(
            make_block, config, rngs=rngs, only_layer=only_layer
        )
        self.head = Head(config, masked=True, rngs=rngs)
        self.pooling = (
            layers.Linear(embed, embed, use_bias=config.use_bias, rngs=rngs)
            if use_pooling
            else None
        )

    @dtype_promotion()
    def __call__(
        self, batch: dict[str, Any], key: jax.Array | None = None
    ) -> Float[Array, "B L M"]:
        """Encodes a batch to one vector per token.

        Args:
            batch: `tokens` int32[B, L]; optional `lengths` int32[B] (padding follows),
                `segment_ids` int32[B, L] (packed documents, 0 is padding), `positions`
                and `token_types` int32[B, L].
            key: Dropout key; None in evaluation.

        Raises:
            ConfigError: The sequence is longer than the table of learned positions.
        """
        return hidden_states(self, batch, key)

    @dtype_promotion()
    def logits(self, batch: dict[str, Any]) -> Float[Array, "B L V"]:
        """Logits of the token at each position, in float32."""
        return self.head.logits(self(batch), self._table())

    @dtype_promotion()
    def pool(self, batch: dict[str, Any]) -> Float[Array, "B M"]:
        """Vector of each row: the first token's, through a layer and tanh.

        Needs `use_pooling`.
        """
        assert self.pooling is not None
        return jnp.tanh(self.pooling(self(batch)[:, 0]))

    def _table(self):
        return self.embedding.tokens[...] if self.config.tied_head else None
