"""Blocks of 8-bit integers in place of numbers, as compressed communication sends."""

from zjax_kernels.quantise.api import dequantise_blocks, quantise_blocks

__all__ = ["dequantise_blocks", "quantise_blocks"]
