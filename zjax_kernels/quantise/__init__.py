"""Block-wise int8 quantisation, for compressed communication."""

from zjax_kernels.quantise.api import dequantise_blocks, quantise_blocks

__all__ = ["dequantise_blocks", "quantise_blocks"]
