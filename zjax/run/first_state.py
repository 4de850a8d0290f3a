"""First state of a run: initialised, or made of weights that the run starts from."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from zjax.checkpoint import start as weights
from zjax.offload.init import init_layer_by_layer
from zjax.replicas.state import init_state
from zjax.run.pruned_start import decide
from zjax.settings.parameters import is_held_frozen
from zjax.settings.schema import Config
from zjax.sharding.plan import Plan, staged_plan
from zjax.train.compute_params import unsplit_plans
from zjax.train.state import TrainState
from zjax.typing import Model
from zjax.weights import adapters, growth, huggingface, peft
from zjax.weights.codes import with_codes
from zjax.weights.source import Entry, Source


def first_state(model: Model, tx: Any, plan: Plan, config: Config) -> TrainState:
    """Creates the state of step 0, from weights of `checkpoint.init_from` if set."""
    start, key = config.checkpoint.init_from, jax.random.key(config.seed)
    adapt = _make_adapt(model, config, key)
    if plan.is_offloaded and (model.init_layer or start):
        staged = unsplit_plans(staged_plan(plan).master)
        initial = weights.iter_weights(start, staged, adapt) if start else None
        # The unsharded parameters of the full model may not fit on the devices.
        state = init_layer_by_layer(
            key, model, tx, plan, config.precision, weights=initial
        )
    else:
        master = weights.load_weights(start, plan.master, adapt) if start else None
        state = init_state(key, model, tx, plan, config, master=master)
    if not start:
        return state
    known = weights.load_model_state(start, state.model_state, plan.model_state)
    return dataclasses.replace(state, model_state=known)


def _make_adapt(model: Model, config: Config, key: jax.Array) -> weights.Adapt:
    """Returns a function that fits weights of `checkpoint.init_from` to the model."""
    initial = growth.initial_values(model.init, key)
    shape, start, lora = config.model, config.checkpoint, config.lora
    dtype = config.precision.compute_dtype
    pruned = decide(config)
    is_frozen = functools.partial(is_held_frozen, config=config)

    def adapt(source: Source, wanted: Mapping[str, Entry]) -> Source:
        # The order matters: each conversion reads names and shapes that the last one
        # made.
        config_json = weights.find_config(start.init_from)
        if pruned is not None:
            source, config_json = pruned.adapt(source, config), None
        source = huggingface.adapted(source, wanted, config_json, shape, start)
        source = growth.resized(source, wanted, start, shape.vocab_size, is_frozen)
        source = growth.upcycled(source, wanted, shape, start, config.seed, initial)
        source = with_codes(source, wanted)
        source = growth.with_values(source, wanted)
        if lora and lora.init_from:
            return peft.with_peft(source, wanted, lora, shape, config_json)
        if lora:
            return adapters.with_adapters(source, wanted, dtype, initial)
        return source

    return adapt
