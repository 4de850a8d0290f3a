"""Checkpoints of a run that restore onto any mesh; exports, and starts from weights."""

from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.start import load_weights
from zjax.checkpoint.store import Store

__all__ = ["Store", "export_safetensors", "load_weights"]
