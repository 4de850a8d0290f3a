"""Every test sees 8 CPU devices, and implicit rank promotion is an error.

Programs are compiled once for all tests and for the programs that they start, and with
little optimisation: nothing here runs for long.
"""

import os
import pathlib

CACHE = pathlib.Path(__file__).parent / ".pytest_cache" / "programs"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax  # noqa: E402  (reads the environment)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
