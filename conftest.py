"""Every test sees 8 CPU devices, and implicit rank promotion is an error.

Programs are compiled once for all tests and for the programs that they start, and with
little optimisation: nothing here runs for long. Most of the time of the tests is that
of the compiler, and kernels of its older emitter, where JAX still has it, compile in
half of it.
"""

import importlib
import os
import pathlib

import jaxlib.version

CACHE = pathlib.Path(__file__).parent / ".pytest_cache" / "programs"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if jaxlib.version.__version_info__ < (0, 11):  # elsewhere an unknown flag is fatal
    QUICK = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )
    os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402  (reads the environment)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_sessionstart():
    """Else a module whose examples run alone is imported by its package and again."""
    importlib.import_module("zjax")
