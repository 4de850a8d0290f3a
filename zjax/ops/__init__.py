"""Array functions of general use: attention, normalisation, positions, token loss."""

from zjax.ops.attention import choose_implementation, dot_product_attention
from zjax.ops.cross_entropy import TokenLoss, token_loss
from zjax.ops.norm import layer_norm, rms_norm
from zjax.ops.rotary import make_rotary_tables, rotate

__all__ = [
    "TokenLoss",
    "choose_implementation",
    "dot_product_attention",
    "layer_norm",
    "make_rotary_tables",
    "rms_norm",
    "rotate",
    "token_loss",
]
