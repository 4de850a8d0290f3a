"""Array functions of models: attention, positions, token loss, matmuls, remat."""

from zjax.ops.attention import choose_implementation, dot_product_attention
from zjax.ops.cross_entropy import TokenLoss, token_loss
from zjax.ops.rotary import make_rotary_tables, rotate

__all__ = [
    "TokenLoss",
    "choose_implementation",
    "dot_product_attention",
    "make_rotary_tables",
    "rotate",
    "token_loss",
]
