"""Compiler options of a run, the cache of compiled programs, and compilation ahead."""

import concurrent.futures
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from absl import logging
from jaxlib import version

from zjax.errors import ConfigError, Problem
from zjax.jaxprs.versions import knows_option
from zjax.schedule.training import TrainingSchedule
from zjax.settings.schema import Config
from zjax.sharding.memory import num_zero_shares
from zjax.sharding.mesh import platform_of
from zjax.sharding.placement import ArrayPlan, array_bytes
from zjax.sharding.plan import Plan
from zjax.sharding.zero import stored_shape
from zjax.typing import Batch

Options = dict[str, Any]

GPUS = ("gpu", "cuda")
"""Platform names of a real GPU, and of a GPU that programs are only compiled for."""
MIN_COMBINED_BYTES = 16 * 2**20
"""Least bytes of a combined collective: latency dominates smaller messages."""
MIN_EARLY_BYTES = 128 * 2**20
"""Bytes of a layer from which collectives should start as early as possible.

The scheduler's bandwidth estimates start them as late as possible, which saves memory:
0.8 % faster for layers of 61 MB, 2.2 % slower for layers of 403 MB.
"""
LOADS_SIMULATED = version.__version_info__ < (0, 11)
"""Whether simulated devices may run cached programs; newer versions can deadlock."""


def step_options(config: Config, plan: Plan) -> Options:
    """Compiler options of a step's programs by name; `xla_options` override defaults.

    Defaults that this XLA lacks are left out and logged; configured ones raise.
    """
    configured = parse_options(config.xla_options)
    derived: Options = {}
    if platform_of(plan.mesh) in GPUS:
        derived = _gpu_options(config, plan)
    known = {
        name: value for name, value in derived.items() if knows_option(name, value)
    }
    options = known | configured
    _log_options(tuple(sorted(options.items())), tuple(derived.keys() - known))
    return options


def parse_options(pairs: tuple[str, ...]) -> Options:
    """Parses compiler options of a config; `true` and `false` become booleans."""
    options: Options = {}
    problems = []
    for pair in pairs:
        name, found, text = pair.partition("=")
        value = {"true": True, "false": False}.get(text.lower(), text)
        if found and knows_option(name, value):
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
    """Caches compiled programs on disk, so that a restart need not compile.

    `jax_compilation_cache_dir` takes precedence; an empty one turns the cache off, as
    does `jax_enable_compilation_cache`.

    Args:
        shared: Folder that all processes see; empty for a run of one process, which
            uses the user's cache directory.

    Returns:
        The directory, or None if the cache is off.
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
    """Settings that make JAX simulate devices; apply them before JAX starts.

    Args:
        num_devices: Number of CPU devices; 0 for the real devices.

    Returns:
        Values by name in `jax.config`; JAX reads the name in capitals from the
        environment.
    """
    if not num_devices:
        return {}
    options: Options = {"jax_platforms": "cpu", "jax_num_cpu_devices": num_devices}
    if not LOADS_SIMULATED:
        options["jax_enable_compilation_cache"] = False
    return options


def _gpu_options(config: Config, plan: Plan) -> Options:
    """Options that GPUs need for overlap, fused biases and determinism."""
    options: Options = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # cuBLAS is as fast, and adds biases in the same pass.
        "xla_gpu_enable_triton_gemm": False,
        # Merged products of one input cannot fuse their biases.
        "xla_gpu_dot_merger_threshold_mb": "0",
    }
    if plan.num_batch_shares * plan.num_length_shares > 1:
        # The collectives of one layer are combined into one.
        full = max(MIN_COMBINED_BYTES, layer_bytes(plan))
        # The threshold of a reduce-scatter applies to its result on one device.
        shard = max(MIN_COMBINED_BYTES, layer_bytes(plan) // num_zero_shares(plan))
        sizes = {"all_gather": full, "all_reduce": full, "reduce_scatter": shard}
        for collective, size in sizes.items():
            options[f"xla_gpu_{collective}_combine_threshold_bytes"] = str(size)
        if layer_bytes(plan) >= MIN_EARLY_BYTES:
            options["xla_gpu_enable_analytical_sol_latency_estimator"] = False
    if config.deterministic:
        options["xla_gpu_exclude_nondeterministic_ops"] = True
        # Without the expander a deterministic scatter becomes a loop over its rows.
        options["xla_gpu_enable_scatter_determinism_expander"] = True
    return options


def layer_bytes(plan: Plan) -> int:
    """Bytes of one layer's parameters on a device, once gathered; 0 without layers."""

    def one(row: ArrayPlan) -> int:
        used = stored_shape(row.shape, row.used.spec, plan.mesh)
        shape = row.used.shard_shape(used)
        return array_bytes(shape[1:], row.dtype)

    return sum(one(row) for row in jax.tree.leaves(plan.compute) if row.num_layers)


# Cached to log each combination once.
@functools.cache
def _log_options(taken: tuple[tuple[str, Any], ...], unknown: tuple[str, ...]) -> None:
    """Logs the options in use, and warns of options that this XLA lacks."""
    if taken:
        pairs = " ".join(f"{name}={value}" for name, value in taken)
        logging.info("XLA options: %s", pairs)
    if unknown:
        logging.warning("XLA options that this jaxlib lacks: %s", " ".join(unknown))


class CompileAhead:
    """Compiles the programs of the next change of a schedule in a background thread.

    JAX caches programs by shape, so the later step finds the program compiled. Leaving
    the context manager waits for the thread.

    Args:
        compile: Function of a batch, the name of a program and a step, that compiles
            the program, as `Step.compile` does.
        first_step: First step of the loop, whose programs are not compiled ahead.
    """

    def __init__(
        self,
        schedule: TrainingSchedule,
        compile: Callable[[Batch, str, int], Any],
        first_step: int,
    ):
        self._schedule, self._compile = schedule, compile
        self._changes = schedule.changes(first_step)
        # Programs of several buckets are needed soon after the same change.
        self._most = len(schedule.shapes) if schedule.has_buckets else 1
        self._started: dict[int, concurrent.futures.Future[None]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def after(self, number: int, batch: Batch) -> None:
        """Starts to compile what changes after step `number`, which read `batch`."""
        shape = self._schedule.at(number)[:2]
        while len(self._started) < self._most:
            steps = next(self._changes, None)
            if steps is None:
                return
            new, shapes = self._schedule.at(steps.start)[:2], batch
            # Batches of the user keep their shapes, of which the settings know nothing.
            if new != shape:
                shapes = jax.tree.map(functools.partial(_with_shape, new), batch)
            # Nobody reads an error of the future: a program that cannot be compiled
            # fails again when its step comes.
            self._started[steps.start] = self._pool.submit(
                self._compile_all, steps, shapes
            )

    def _compile_all(self, steps: range, batch: Batch) -> None:
        """Compiles all programs that read batches of some steps."""
        for program in self._schedule.exchanges.batch_programs(steps):
            self._compile(batch, program, steps.start)

    def started(self, number: int) -> bool:
        """Whether a program compiled ahead is first used at step `number`."""
        return number in self._started

    def wait(self, number: int) -> None:
        """Waits for the programs compiled ahead for step `number`."""
        concurrent.futures.wait([self._started.pop(number)])


def _with_shape(shape: tuple[int, ...], x: jax.Array) -> jax.ShapeDtypeStruct:
    """Replaces the leading dims of an array's shape by rows and tokens per row."""
    return jax.ShapeDtypeStruct((*shape, *x.shape[2:]), x.dtype)
