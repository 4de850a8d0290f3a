"""Hugging Face checkpoints: settings, and weights in and out."""

from zjax.huggingface.peft_source import adapter_settings
from zjax.huggingface.settings import model_settings

__all__ = ["adapter_settings", "model_settings"]
