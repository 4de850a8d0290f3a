"""The interpreter of GPU kernels, by the name that this JAX has for its parameters."""

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

__all__ = ["InterpretGPUParams"]
