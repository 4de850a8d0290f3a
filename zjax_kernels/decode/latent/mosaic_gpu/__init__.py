"""Kernel of paged attention over latents on Hopper GPUs."""

from zjax_kernels.decode.latent.mosaic_gpu.kernel import paged_attention

__all__ = ["paged_attention"]
