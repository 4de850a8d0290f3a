"""Decoders to write text with: from a run, from a Hugging Face checkpoint, or given."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from zjax.checkpoint.start import (
    Adapt,
    find_config,
    load_weights,
    settings_of_weights,
    unchanged,
)
from zjax.config.load import load_config
from zjax.data.prompts import Prompts, make_prompts
from zjax.data.tokenizer import load_tokenizer
from zjax.data.tokenizer_files import TOKENIZER_NAME
from zjax.errors import ConfigError, Problem
from zjax.files import local_path
from zjax.generation.cutting import Unread
from zjax.generation.recomputed import Recomputed
from zjax.models.build import make_model
from zjax.models.stack import Decoder
from zjax.models.submodel import names_only
from zjax.settings.schema import Config
from zjax.sharding.layers import layer_by_layer
from zjax.sharding.mesh import PIPELINE, make_mesh
from zjax.sharding.plan import Plan, make_plan
from zjax.typing import Model
from zjax.weights import huggingface
from zjax.weights.source import Source


class Opened(NamedTuple):
    """A decoder with what turns text into tokens."""

    decoder: Any
    """`Decoder`, or another decoder that `zjax.generate` takes."""
    prompts: Prompts | None
    """None takes and gives tokens."""
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    """Context of the passes: the mesh in use."""
    unread: Unread | None = None
    """Weights of a `Decoder` with shapes alone."""


LogitsFn = Callable[[Any, jax.Array], jax.Array]
"""`logits_fn(model, tokens int32[B, L]) -> logits [B, L, V]` of a causal model."""


def open_decoder(
    source: Any,
    state: Any,
    prompts: Prompts | None,
    logits_fn: LogitsFn | None = None,
    max_length: int = 0,
) -> Opened:
    """Opens what `zjax.Generator` takes."""
    if isinstance(source, Opened):
        return source
    is_run = hasattr(source, "decoder")
    if is_run and state is None:
        problem, remedy = "is missing", "give run.state, or a later one"
        raise ConfigError(Problem("state", None, problem, remedy))
    if is_run and not continues_text(source.model):
        return _open_recomputed(source, state, prompts, logits_fn, max_length)
    if logits_fn is not None:
        problem = "is not read: the built-in decoder has logits of its own"
        raise ConfigError(Problem("logits_fn", "given", problem, "leave it out"))
    if isinstance(source, str | os.PathLike):
        return open_huggingface(os.fspath(source))
    if is_run:
        decoder, config = source.decoder(state), source.config
        prompts = prompts or make_prompts(config.data, config.model.vocab_size)
        return Opened(decoder, prompts, functools.partial(jax.set_mesh, source.mesh))
    if not hasattr(source, "config"):
        remedy = "give a directory, a run of the built-in decoder, or a Decoder"
        name = type(source).__name__
        raise ConfigError(Problem("source", name, "writes no text", remedy))
    return Opened(source, prompts, contextlib.nullcontext)


def continues_text(model: Model) -> bool:
    """Whether a model continues text from stored keys."""
    return model.stack is not None and model.stack.continuation is not None


def _open_recomputed(
    run: Any,
    state: Any,
    prompts: Prompts | None,
    logits_fn: LogitsFn | None,
    max_length: int,
) -> Opened:
    """Opens a model of the user, which reads the whole text for each token."""
    if not isinstance(max_length, int) or max_length < _SHORTEST_TEXT:
        problem = "is no length of texts that your model reads"
        remedy = "give the most tokens of a prompt with a text, 2 or more"
        raise ConfigError(Problem("max_length", max_length, problem, remedy))
    model, name = run.model, getattr(logits_fn, "__name__", None)

    def score(weights: Any, tokens: jax.Array) -> jax.Array:
        with names_only():
            bound = model.bind(*weights)
            return bound(tokens) if logits_fn is None else logits_fn(bound, tokens)

    context = functools.partial(jax.set_mesh, run.mesh)
    with context():
        weights = run.step.gathered(state), state.model_state
        decoder = Recomputed(score, weights, max_length, name)
    return Opened(decoder, prompts, context)


_SHORTEST_TEXT = 2
"""Least tokens of a prompt with a text."""


def open_huggingface(directory: str) -> Opened:
    """Opens the weights of a Hugging Face checkpoint in bfloat16, with tokenizer.

    Devices split the model as the default mesh of a run with these weights does.
    """
    directory = local_path("model", directory)
    config = settings_of_huggingface(directory)
    adapt = functools.partial(_adapted, config=config)
    # A GGUF file has the files of a tokenizer beside it.
    is_file = os.path.isfile(directory)
    folder = os.path.dirname(directory) if is_file else directory
    tokenizer = load_tokenizer(os.path.join(folder, TOKENIZER_NAME))
    prompts = Prompts(tokenizer, folder)
    return read_decoder(*plan_weights(config), prompts, directory, adapt)


def plan_weights(config: Config) -> tuple[Model, Plan]:
    """Makes the model of settings, and plans the weights without an optimizer."""
    model = make_model(config)
    return model, make_plan(config, make_mesh(config.mesh), model, optax.identity())


def read_decoder(
    model: Model,
    plan: Plan,
    prompts: Prompts,
    path: str,
    adapt: Adapt = unchanged,
    source: Source | None = None,
) -> Opened:
    """Opens weights that are read layer by layer onto the devices by `load_weights`."""
    rows, mesh = plan.compute, plan.mesh
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
    decoder = model.bind(shapes, {})
    if not isinstance(decoder, Decoder):
        problem, remedy = "writes no text", "give a decoder"
        raise ConfigError(Problem("model.kind", decoder.config.kind, problem, remedy))
    assert isinstance(mesh, Mesh)
    if mesh.shape[PIPELINE] == 1:  # stages hold parts of stacks
        rows = jax.tree.map(layer_by_layer, rows)
    read = functools.partial(load_weights, path, rows, adapt, source)
    context = functools.partial(jax.set_mesh, mesh)
    return Opened(decoder, prompts, context, Unread(rows, read))


def settings_of_huggingface(directory: str) -> Config:
    """Makes the settings with which the weights of a checkpoint are planned."""
    return load_config({}, settings_of_weights(directory) | WITHOUT_MOMENTS)


WITHOUT_MOMENTS = {"optimizer.rule": {"kind": "sgd", "b1": 0.0}}
"""Nothing is trained, so that the plan need hold nothing for it."""


def _adapted(source, wanted, *, config):
    """Maps the tensors of the checkpoint to the built-in decoder."""
    config_json = find_config(config.checkpoint.init_from)
    shape = config.model, config.checkpoint
    return huggingface.adapted(source, wanted, config_json, *shape)
