"""Flax models as pure functions, and the built-in decoder and encoder."""

from zjax.models.adapter import adapt
from zjax.models.build import make_model
from zjax.models.decoder import Decoder
from zjax.models.encoder import Encoder
from zjax.models.stack import make_stack

__all__ = [
    "Decoder",
    "Encoder",
    "adapt",
    "make_model",
    "make_stack",
]
