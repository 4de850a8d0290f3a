"""Hugging Face checkpoints: settings, and weights in and out."""

from zjax.weights.config_json import model_settings
from zjax.weights.peft import adapter_settings

__all__ = ["adapter_settings", "model_settings"]
