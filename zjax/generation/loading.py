"""Decoders to write text with: from a run, from a Hugging Face checkpoint, or given."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from zjax.checkpoint.start import find_config, load_weights, settings_of_weights
from zjax.config.load import load_config
from zjax.data.prompts import Prompts, make_prompts
from zjax.data.tokenizer import load_tokenizer
from zjax.data.tokenizer_files import TOKENIZER_NAME
from zjax.errors import ConfigError, Problem
from zjax.files import local_path
from zjax.models.build import make_model
from zjax.models.stack import Decoder
from zjax.optim.build import make_optimizer
from zjax.settings.schema import Config
from zjax.sharding.mesh import make_mesh
from zjax.sharding.plan import make_plan
from zjax.weights import huggingface


class Opened(NamedTuple):
    """A decoder with what turns text into tokens."""

    decoder: Any
    """`Decoder`, or another decoder that `zjax.generate` takes."""
    prompts: Prompts | None
    """None takes and gives tokens."""
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    """Context of the passes: the mesh in use."""


def open_decoder(source: Any, state: Any, prompts: Prompts | None) -> Opened:
    """Opens what `zjax.Generator` takes."""
    if isinstance(source, str | os.PathLike):
        return open_huggingface(os.fspath(source))
    if hasattr(source, "decoder"):
        if state is None:
            problem, remedy = "is missing", "give run.state, or a later one"
            raise ConfigError(Problem("state", None, problem, remedy))
        decoder, config = source.decoder(state), source.config
        prompts = prompts or make_prompts(config.data, config.model.vocab_size)
        return Opened(decoder, prompts, functools.partial(jax.set_mesh, source.mesh))
    if not hasattr(source, "config"):
        remedy = "give a directory, a run of the built-in decoder, or a Decoder"
        name = type(source).__name__
        raise ConfigError(Problem("source", name, "writes no text", remedy))
    return Opened(source, prompts, contextlib.nullcontext)


def open_huggingface(directory: str) -> Opened:
    """Reads the weights of a Hugging Face checkpoint in bfloat16, with tokenizer.

    Devices split the model as the default mesh of a run with these weights does.
    """
    directory = local_path("model", directory)
    config = settings_of_huggingface(directory)
    model, mesh = make_model(config), make_mesh(config.mesh)
    plan = make_plan(config, mesh, model, make_optimizer(config))
    adapt = functools.partial(_adapted, config=config)
    params = load_weights(directory, plan.compute, adapt)
    decoder = model.bind(params, {})
    if not isinstance(decoder, Decoder):
        problem, remedy = "writes no text", "give a decoder"
        raise ConfigError(Problem("model.kind", config.model.kind, problem, remedy))
    tokenizer = load_tokenizer(os.path.join(directory, TOKENIZER_NAME))
    prompts = Prompts(tokenizer, directory)
    return Opened(decoder, prompts, functools.partial(jax.set_mesh, mesh))


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
