"""Refuses settings and losses that would have no effect in a run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from zjax.errors import ConfigError, ModelError, Problem
from zjax.models.rounded import check_rounding
from zjax.optim.groups import used_axes
from zjax.settings import choices, schema
from zjax.settings.parameters import is_adapter
from zjax.sharding import mesh as meshes
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key
from zjax.stack.forward import StackLoss, name_of_loss, runs_stack
from zjax.typing import Batch, Model


def check_has_effect(config: schema.Config, model: Any) -> None:
    """Refuses settings that this kind of run never reads; warns of report settings."""
    _log_unread(config)
    if problems := _read_by_trainer(config):
        raise ConfigError(*problems)
    by_block = isinstance(model, Model) and model.runs_by_block
    if config.model.offloads_inputs and not (config.zero.offloads_state and by_block):
        where = config.model.activation_memory
        problem = "has no effect on the model that was given"
        remedy = "leave it at 'device', and wrap blocks in zjax.ops.remat.recompute"
        raise ConfigError(Problem("model.activation_memory", where, problem, remedy))
    if not isinstance(model, Model) and (problems := _read_by_built_in(config)):
        raise ConfigError(*problems)


def check_axes(
    config: schema.Config, num_devices: int, model: Model, batch: Batch
) -> None:
    """Refuses a sequence axis that shards nothing; warns of further idle axes.

    The user's functions may compute over idle expert and tensor axes by themselves.
    """
    sizes = meshes.mesh_sizes(config.mesh, num_devices)
    has_sequences = any(len(x.shape) > 1 for x in jax.tree.leaves(batch))
    if (size := sizes[meshes.SEQUENCE]) > 1 and not has_sequences:
        problem = "shards no array of the batch"
        remedy = "give arrays with a second dim, or use 1"
        raise ConfigError(Problem("mesh.sequence", size, problem, remedy))
    used = used_axes(model, config.mesh)
    for axis in (meshes.EXPERT, meshes.TENSOR):
        if sizes[axis] > 1 and axis not in used and jax.process_index() == 0:
            text = "mesh.%s=%s shards no dim of a parameter; name dims in mesh.rules"
            logging.warning(text, axis, sizes[axis])


def check_loss_acts(config: schema.Config, model: Model, num_stages: int) -> None:
    """Refuses a loss other than the stack's loss where a run trains the stack."""
    if model.stack is None or runs_stack(model):
        return
    if isinstance(model.loss, StackLoss):
        problem, remedy = (
            "is the loss of another stack than model.stack",
            "change both by zjax.with_stack",
        )
        raise ModelError(Problem("model.loss", name_of_loss(model), problem, remedy))
    readers = []
    if num_stages > 1:
        readers.append(f"mesh.pipeline={num_stages}")
    if config.zero.offloads_state and model.runs_by_block:
        readers.append(f"zero.offload={config.zero.optimizer_memory!r}")
    if readers:
        cause = " and ".join(readers)
        problem = f"is not the loss of model.stack, which {cause} trains"
        remedy = "change the stack by zjax.with_stack, or set stack=None"
        raise ModelError(Problem("model.loss", name_of_loss(model), problem, remedy))


def _read_by_built_in(config: schema.Config) -> list[Problem]:
    """Lists model settings that only the built-in model reads."""
    default, given = schema.Model(), config.model
    remedies = {
        "attention": "call zjax_kernels.sparse_attention in the model",
        "remat": "wrap blocks in zjax.ops.remat.recompute",
    }
    return [
        Problem(
            f"model.{name}",
            choices.value_at(given, name),
            "has no effect on the model that was given",
            f"leave it at {choices.value_at(default, name)!r}, and {remedy}",
        )
        for name, remedy in remedies.items()
        if getattr(given, name) != getattr(default, name)
    ]


def _log_unread(config: schema.Config) -> None:
    """Warns of report settings, which only `zjax.Trainer` reads."""
    given, default = config.observe, schema.Observe()
    names = [
        f"observe.{x.name}={getattr(given, x.name)!r}"
        for x in dataclasses.fields(given)
        if getattr(given, x.name) != getattr(default, x.name)
    ]
    if names and jax.process_index() == 0:
        text = "%s: read by zjax.Trainer alone; write the metrics that steps return"
        logging.warning(text, ", ".join(names))


def _read_by_trainer(config: schema.Config) -> list[Problem]:
    """Lists settings that only `zjax.Trainer` reads."""
    policy, limit = config.precision.on_nonfinite, config.precision.max_skipped_in_a_row
    default = schema.Precision().max_skipped_in_a_row
    stopping = config.evaluation.early_stopping
    patience = stopping and stopping.patience
    look = "look at metrics['skipped_steps'], or leave it at"
    evaluate = "call run.evaluate, or leave it out"
    unread = (
        (policy == "stop", "precision.on_nonfinite", policy, f"{look} 'skip'"),
        (
            limit != default,
            "precision.max_skipped_in_a_row",
            limit,
            f"{look} {default}",
        ),
        (
            stopping is not None,
            "evaluation.early_stopping.patience",
            patience,
            evaluate,
        ),
    )
    return [
        Problem(field, value, "is read by zjax.Trainer alone", remedy)
        for is_unread, field, value, remedy in unread
        if is_unread
    ]


def check_model_acts(config: schema.Config, model: Model) -> None:
    """Refuses starts and changes of weights that the functions of a model lack."""
    if config.prune and (model.stack is None or model.stack.continuation is None):
        problem = "takes parts of the built-in decoder, not of the model that was given"
        remedy = "leave it out, or give zjax.make_model(config)"
        raise ConfigError(Problem("prune", "prune", problem, remedy))
    if config.lora:
        check_adapters(config.lora, model)
    if config.quantize:
        check_rounding(config.quantize, model)


def check_adapters(lora: schema.Lora, model: Model) -> None:
    """Refuses LoRA settings that differ from the adapters of the model."""
    params, _ = jax.eval_shape(model.init, abstract_key())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    adapters = {path_of(k): x for k, x in leaves if is_adapter(path_of(k))}
    if not adapters:
        problem = "adds no adapters to a zjax.Model, whose functions are given"
        remedy = "use zjax.adapt(..., adapters=config.lora), or leave lora out"
        raise ConfigError(Problem("lora.rank", lora.rank, problem, remedy))
    remedy = "give zjax.adapt and the run the same settings"
    ranks = {x.shape[-1] for path, x in adapters.items() if path.endswith("/a")}
    if ranks != {lora.rank}:
        problem = (
            f"is not the rank of the model's adapters ({', '.join(map(str, ranks))})"
        )
        raise ConfigError(Problem("lora.rank", lora.rank, problem, remedy))
    is_dora = any(path.endswith("/magnitude") for path in adapters)
    if is_dora != (lora.form == "dora"):
        problem = "is not the form of the model's adapters"
        raise ConfigError(Problem("lora.form", lora.form, problem, remedy))
    has_codes = any(jnp.issubdtype(x.dtype, jnp.integer) for _, x in leaves)
    if lora.quantize and not has_codes:
        problem = "quantises no matrix but those of the built-in models"
        remedy = "leave it out, or give zjax.make_model(config)"
        kind = lora.quantize.kind
        raise ConfigError(Problem("lora.quantize", kind, problem, remedy))
