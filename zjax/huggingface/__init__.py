"""Hugging Face checkpoints: their settings, and their weights in and out."""

from zjax.huggingface.settings import model_settings

__all__ = ["model_settings"]
