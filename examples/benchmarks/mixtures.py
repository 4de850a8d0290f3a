"""A mixture of experts that peers train, a whole model cut in layers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A decoder with SwiGLU experts in every layer: the architecture of Qwen3-MoE.

    Args:
        num_layers: Layers.
        embed_size: Channels of a token.
        mlp_size: Hidden channels of an expert.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values.
        head_size: Channels of a head.
        vocab_size: Rows of the token table, and of the untied head.
        num_experts: Experts of each layer.
        top_k: Experts of each token.
        length: Tokens per sequence.
        microbatch_size: Sequences of a step.
    """

    num_layers: int
    embed_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    num_experts: int
    top_k: int
    length: int
    microbatch_size: int

    @property
    def num_params(self) -> int:
        vectors = self.num_layers * 2 * (self.embed_size + self.head_size)
        table = self.vocab_size * self.embed_size
        return self._matrices(self.num_experts) + vectors + self.embed_size + table

    @property
    def matmul_params(self) -> int:
        """The N of 6 N: entries of matrices; of the experts `top_k` count."""
        return self._matrices(self.top_k)

    @property
    def expert_params(self) -> int:
        """Entries of the matrices of one expert."""
        return 3 * self.embed_size * self.mlp_size

    def _matrices(self, num_experts: int) -> int:
        width = self.embed_size
        heads = 2 * (self.num_heads + self.num_kv_heads)
        attention = heads * width * self.head_size
        experts = width * self.num_experts + num_experts * self.expert_params
        return self.num_layers * (attention + experts) + self.vocab_size * width


QWEN3 = Mixture(
    num_layers=6,
    embed_size=2048,
    mlp_size=768,
    num_heads=32,
    num_kv_heads=4,
    head_size=128,
    vocab_size=151_936,
    num_experts=128,
    top_k=8,
    length=4096,
    microbatch_size=8,
)
"""Qwen3-30B-A3B with 6 of 48 layers."""
