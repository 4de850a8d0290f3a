"""A decoder in the form of GPT-2 or Llama.

GPT-2: Radford et al. 2019; Llama: Touvron et al. (arXiv:2302.13971).
"""

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from zjax.config import schema
from zjax.models import layers
from zjax.models.block import Block
from zjax.models.embedding import Embedding
from zjax.models.heads import Head
from zjax.models.segments import make_segments
from zjax.models.stack import hidden_states
from zjax.parallel import sequence
from zjax.promotion import dtype_promotion


class Decoder(nnx.Module):
    """A causal language model.

    Weights are initialised normally with deviation 0.02, those that write to the
    residual stream with 0.02 / sqrt(2 num_layers), as in GPT-2; biases with 0, scales
    with 1.

    Args:
        config: Shape of the model.
        matmul_dtype: Dtype of the operands of the blocks' matrix products.
        deterministic: Whether embedding gradients are summed in a fixed order.
        only_layer: Index of the only layer to initialise; None means all layers.
        rngs: Source of the initial values.

    Example:
        >>> config = schema.Model(num_layers=1, embed_size=8, mlp_size=16, num_heads=2,
        ...                       num_kv_heads=2, vocab_size=11, max_length=4)
        >>> decoder = Decoder(config, rngs=nnx.Rngs(0))
        >>> decoder(jax.numpy.array([[3, 1, 4]])).shape
        (1, 3, 11)
    """

    def __init__(
        self,
        config: schema.Model,
        *,
        matmul_dtype: layers.MatmulDtype = "compute",
        deterministic: bool = False,
        only_layer: jax.Array | None = None,
        rngs: nnx.Rngs,
    ):
        def make_block(rngs: nnx.Rngs, num_experts: int, slides: bool) -> Block:
            return Block(
                config,
                num_experts=num_experts,
                slides=slides,
                causal=True,
                norm_position=config.norm_position,
                matmul_dtype=matmul_dtype,
                rngs=rngs,
            )

        self.config = config
        self.embedding = Embedding(config, deterministic=deterministic, rngs=rngs)
        self.blocks = make_segments(
            make_block, config, rngs=rngs, only_layer=only_layer
        )
        self.head = Head(config, rngs=rngs)

    @dtype_promotion()
    def __call__(
        self,
        tokens: Int[Array, "B L"],
        *,
        segment_ids: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L V"]:
        """Logits of the next token, in float32.

        Args:
            tokens: Token ids, 0 to V - 1.
            segment_ids: Document of each token, 0 for padding.

        Raises:
            ConfigError: The sequence is longer than the table of learned positions.
        """
        batch = {"tokens": tokens}
        if segment_ids is not None:
            batch["segment_ids"] = segment_ids
        x = sequence.restore(hidden_states(self, batch, None), self.config)
        return self.head.logits(x, self._table())

    def _table(self):
        return self.embedding.tokens[...] if self.config.tied_head else None
