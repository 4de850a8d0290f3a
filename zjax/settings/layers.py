"""Chooses between a loop over layers and unrolled layers; checks pipeline stages."""

import math
from collections.abc import Iterator

from zjax.errors import ConfigError, Problem
from zjax.settings import axes, batch, schema
from zjax.settings.mixture import describe_blocks, num_blocks


def cannot_unroll(config: schema.Config) -> bool:
    """Whether a program may not contain several layers side by side.

    XLA makes cuDNN's attention backward deterministic in the first layer of a program
    only and finds no kernel for later layers, so the program fails to start.
    """
    may_take_cudnn = (
        config.model.attention.kind in ("auto", "cudnn")
        and config.precision.compute_dtype != "float32"
    )
    return config.deterministic and may_take_cudnn


def layers_per_scan(config: schema.Config) -> int:
    """Layers per iteration of the loop over layers; 0 for no loop.

    `model.layers_per_scan=0` becomes 1 if layers cannot be unrolled, or contain loops:
    unrolled, each layer would hold a copy of the weights until the backward pass. With
    offloaded state each block is a program, and needs neither.
    """
    chosen = config.model.layers_per_scan
    per_block = config.zero.offloads_state
    loops = cannot_unroll(config) or config.model.mlp_chunk_tokens > 0
    return 1 if not chosen and not per_block and loops else chosen


def stage_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings that contradict pipeline stages, or need a pipeline."""
    given, size = config.pipeline, _num_stages(config, num_devices)
    if size == 1:
        problem = "has no effect with mesh.pipeline=1"
        remedy = "leave it out, or set mesh.pipeline above 1"
        if not isinstance(given, schema.OneFOneB):
            yield Problem("pipeline", given.kind, problem, remedy)
        elif not given.recompute:
            yield Problem("pipeline.recompute", False, problem, remedy)
        return
    if offload := config.zero.offload:
        problem = f"moves blocks one by one, and mesh.pipeline={size} runs whole stages"
        remedy = "use None, or mesh.pipeline=1"
        yield Problem("zero.offload", offload.kind, problem, remedy)
    if isinstance(given, schema.Interleaved):
        yield from _groups(config, num_devices, size)


def model_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings of the built-in models that contradict the stages."""
    given, size = config.pipeline, _num_stages(config, num_devices)
    if size == 1:
        return
    model = config.model
    blocks = num_blocks(model)
    if blocks < size:
        given_size = config.mesh.pipeline
        problem = f"makes more stages than {describe_blocks(model)}"
        problem = f"comes out as {size} and {problem}" if given_size == -1 else problem
        remedy = f"use at most {blocks}"
        yield Problem("mesh.pipeline", given_size, problem, remedy)
    elif isinstance(given, schema.Interleaved):
        yield from _chunks(config.model, given.num_chunks, size)
    if model.layers_per_scan:
        problem = "has no effect in a pipeline, whose stages unroll their layers"
        yield Problem("model.layers_per_scan", model.layers_per_scan, problem, "use 0")
    if model.activation_memory != "device":
        problem = (
            "has no effect in a pipeline, whose stages store activations themselves"
        )
        remedy = "leave it at 'device'"
        memory = model.activation_memory
        yield Problem("model.activation_memory", memory, problem, remedy)
    if isinstance(given, schema.ZbH1) and model.remat != "none":
        problem = "hides the weight gradients that pipeline='zb_h1' separates"
        remedy = "use 'none', or pipeline='1f1b'"
        yield Problem("model.remat", model.remat, problem, remedy)
    if cannot_unroll(config):
        problem = "cannot repeat a cuDNN kernel in each stage"
        remedy = "use False, or model.attention='xla'"
        yield Problem("deterministic", True, problem, remedy)


def _chunks(model: schema.Model, given: int, num_stages: int) -> Iterator[Problem]:
    """Yields a number of chunks that does not split the blocks equally."""
    num_layers = num_blocks(model)
    if num_layers % (num_stages * given) == 0:
        return
    problem = f"does not split {describe_blocks(model)} equally over"
    problem += f" {num_stages} stages"
    sizes = range(2, num_layers // num_stages + 1)
    fits = [size for size in sizes if num_layers % (num_stages * size) == 0]
    other = "use pipeline='1f1b', or another number of layers"
    remedy = f"use {fits[0]}" if fits else other
    yield Problem("pipeline.num_chunks", given, problem, remedy)


def _num_stages(config: schema.Config, num_devices: int) -> int:
    """Number of pipeline stages."""
    # An axis of -1 comes out as 0 on too few devices, which another rule refuses.
    return max(1, axes.axis_sizes(config, num_devices)["pipeline"])


def _groups(
    config: schema.Config, num_devices: int, num_stages: int
) -> Iterator[Problem]:
    """Yields a number of microbatches that interleaving cannot group by stages."""
    sizes = axes.axis_sizes(config, num_devices)
    # The rule of the mesh reports wrong sizes.
    if not axes.mesh_fills(config, num_devices):
        return
    try:
        num_shards = math.prod(sizes[axis] for axis in axes.BATCH_AXES)
        number = batch.resolve_batch(config, num_shards).num_microbatches
    except ConfigError:  # the rule of batch sizes reports the error
        return
    if number % num_stages:
        problem = f"does not divide into groups of {num_stages}, as"
        problem += " pipeline='interleaved' takes them"
        remedy = f"use a multiple of {num_stages}"
        yield Problem("num_microbatches", number, problem, remedy)
