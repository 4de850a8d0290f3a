"""Built-in decoder and encoder, and user models, as pure functions."""

from zjax.models.adapter import adapt
from zjax.models.build import make_model
from zjax.models.stack import Decoder, Encoder, make_stack

__all__ = [
    "Decoder",
    "Encoder",
    "adapt",
    "make_model",
    "make_stack",
]
