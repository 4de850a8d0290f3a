"""What is asked of XLA: options, the cache of programs, simulated devices.

Options are passed with each program, where an unknown name can be told and left out; in
XLA_FLAGS it would end the process.
"""

import functools
import math
import os
import pathlib
from typing import Any

import jax
from absl import logging
from jaxlib import version

from zjax.config.schema import Config
from zjax.errors import ConfigError, Problem
from zjax.sharding.memory import num_zero_shares
from zjax.sharding.mesh import platform_of
from zjax.sharding.placement import ArrayPlan, dtype_bytes
from zjax.sharding.plan import Plan
from zjax.sharding.zero import stored_shape

Options = dict[str, Any]

GPUS = ("gpu", "cuda")
"""What JAX calls a device that is here, and one that is only compiled for."""
MIN_COMBINED_BYTES = 16 * 2**20
"""Below this a collective is bound by latency."""
MIN_EARLY_BYTES = 128 * 2**20
"""Of one layer: from here the scheduler does best to start collectives early.

Its estimates by the speed of the links start them as late as they may, which spares
memory: 0.8 % faster for layers of 61 MB, 2.2 % slower for layers of 403 MB.
"""
LOADS_SIMULATED = version.__version_info__ < (0, 11)
"""Whether simulated devices may run programs from a disk.

Under newer versions their collectives may wait for ever, and nothing tells beforehand.
"""


def step_options(config: Config, plan: Plan) -> Options:
    """The options of the programs of a step.

    Args:
        config: Read for `deterministic` and `xla_options`, which have the last word.
        plan: Its mesh, and the bytes of one layer.

    Returns:
        Values by name; what this XLA does not know is left out and logged.

    Raises:
        ConfigError: An option of the config that this XLA does not take.
    """
    given = parse_options(config.xla_options)
    derived: Options = {}
    if platform_of(plan.mesh) in GPUS:
        derived = _gpu_options(config, plan)
    known = {name: value for name, value in derived.items() if _is_known(name, value)}
    _log_options(tuple(sorted((known | given).items())), tuple(derived.keys() - known))
    return known | given


def parse_options(pairs: tuple[str, ...]) -> Options:
    """Reads options as they stand in a config.

    Args:
        pairs: Texts such as `xla_gpu_autotune_level=0`.

    Returns:
        Values by name; `true` and `false` become booleans.

    Raises:
        ConfigError: A pair without `=`, or an option that this XLA does not take.

    Example:
        >>> parse_options(("xla_gpu_autotune_level=0",))
        {'xla_gpu_autotune_level': '0'}
    """
    options: Options = {}
    problems = []
    for pair in pairs:
        name, found, text = pair.partition("=")
        value = {"true": True, "false": False}.get(text.lower(), text)
        if found and _is_known(name, value):
            options[name] = value
            continue
        problem = "is not an option of this XLA" if found else "has no value"
        remedy = (
            "look its name up for this version of jaxlib" if found else "add =value"
        )
        problems.append(Problem("xla_options", pair, problem, remedy))
    if problems:
        raise ConfigError(*problems)
    return options


def use_program_cache(shared: str = "") -> pathlib.Path | None:
    """Keeps compiled programs on disk, so that a restart does not compile again.

    A directory chosen by `jax_compilation_cache_dir` stays; an empty one turns it off,
    and so does `jax_enable_compilation_cache`.

    Args:
        shared: Folder that all processes of a run see; empty for a run of one process,
            whose programs are kept in the user's cache.

    Returns:
        The directory, or None if it is off.
    """
    if not jax.config.values.get("jax_enable_compilation_cache"):
        return None
    chosen: str | None = jax.config.values.get("jax_compilation_cache_dir")
    if chosen or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return pathlib.Path(chosen) if chosen else None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(shared) if shared else pathlib.Path(home) / "zjax"
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    return folder / "programs"


def simulation(num_devices: int) -> Options:
    """Settings that have JAX simulate devices, before it starts.

    Args:
        num_devices: CPU devices; 0 takes the devices that there are.

    Returns:
        Values by their names in `jax.config`, which in capitals are variables.

    Example:
        >>> simulation(8)["jax_num_cpu_devices"]
        8
    """
    if not num_devices:
        return {}
    options: Options = {"jax_platforms": "cpu", "jax_num_cpu_devices": num_devices}
    if not LOADS_SIMULATED:
        options["jax_enable_compilation_cache"] = False
    return options


def _gpu_options(config: Config, plan: Plan) -> Options:
    options: Options = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # cuBLAS is as fast, and adds biases in the same pass.
        "xla_gpu_enable_triton_gemm": False,
        # Products of the same input, once merged, cannot add their biases.
        "xla_gpu_dot_merger_threshold_mb": "0",
    }
    if plan.num_batch_shares * plan.num_length_shares > 1:
        whole = max(MIN_COMBINED_BYTES, layer_bytes(plan))
        # A reduce-scatter is measured by what it leaves on a device.
        scattered = max(MIN_COMBINED_BYTES, layer_bytes(plan) // num_zero_shares(plan))
        sizes = {"all_gather": whole, "all_reduce": whole, "reduce_scatter": scattered}
        for collective, size in sizes.items():
            options[f"xla_gpu_{collective}_combine_threshold_bytes"] = str(size)
        if layer_bytes(plan) >= MIN_EARLY_BYTES:
            options["xla_gpu_enable_analytical_sol_latency_estimator"] = False
    if config.deterministic:
        options["xla_gpu_exclude_nondeterministic_ops"] = True
        # Without it a scatter becomes a loop over its rows.
        options["xla_gpu_enable_scatter_determinism_expander"] = True
    return options


def layer_bytes(plan: Plan) -> int:
    """Bytes of the parameters of one layer on a device, once gathered.

    Args:
        plan: Its parameters in use; layers are what stacked arrays stack.

    Returns:
        Bytes; 0 for a model without such layers.
    """

    def one(row: ArrayPlan) -> int:
        used = stored_shape(row.shape, row.used.spec, plan.mesh)
        shape = row.used.shard_shape(used)
        return math.prod(shape[1:]) * dtype_bytes(row.dtype)

    return sum(one(row) for row in jax.tree.leaves(plan.compute) if row.num_layers)


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    program = jax.jit(lambda: 0, compiler_options={name: value})
    try:
        program.lower().compile()
    except Exception as error:  # each release raises another class
        if name in str(error):
            return False
        raise
    return True


@functools.cache
def _log_options(taken: tuple[tuple[str, Any], ...], unknown: tuple[str, ...]) -> None:
    if taken:
        pairs = " ".join(f"{name}={value}" for name, value in taken)
        logging.info("XLA options: %s", pairs)
    if unknown:
        logging.warning("XLA options that this jaxlib lacks: %s", " ".join(unknown))
