"""The shape of Llama 3 8B for peers, as `configs/llama_8b.py` has it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Llama:
    num_layers: int = 32
    embed_size: int = 4096
    mlp_size: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    vocab_size: int = 128256
    length: int = 4096
    microbatch_size: int = 1

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.embed_size // self.num_heads

    @property
    def num_params(self) -> int:
        vectors = (2 * self.num_layers + 1) * self.embed_size
        return self.matmul_params + vectors + self.vocab_size * self.embed_size

    @property
    def matmul_params(self) -> int:
        """The N of 6 N: entries of matrices, without the table that is looked up."""
        width = self.embed_size
        attention = 2 * width * self.head_size * (self.num_heads + self.num_kv_heads)
        block = attention + 3 * width * self.mlp_size
        return self.num_layers * block + self.vocab_size * width

    def settings(self) -> dict:
        """Arguments of `transformers.LlamaConfig`."""
        return {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.embed_size,
            "intermediate_size": self.mlp_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.length,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "tie_word_embeddings": False,
        }
