"""Layer norm and RMS norm."""

from zjax_kernels.norm.api import STATISTICS, layer_norm, rms_norm

__all__ = ["STATISTICS", "layer_norm", "rms_norm"]
