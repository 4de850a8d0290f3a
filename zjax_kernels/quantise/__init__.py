"""Block-wise int8 quantisation."""

from zjax_kernels.quantise.api import dequantise_blocks, quantise_blocks

__all__ = ["dequantise_blocks", "quantise_blocks"]
