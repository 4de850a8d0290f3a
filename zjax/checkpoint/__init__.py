"""Checkpoints that restore onto any mesh, and weights in the safetensors format."""

from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.store import Store
from zjax.checkpoint.weights import load_weights

__all__ = ["Store", "export_safetensors", "load_weights"]
