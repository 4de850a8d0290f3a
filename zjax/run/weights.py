"""Weights of a run without the state of training, to write text with."""

import dataclasses
import os

import jax

from zjax.checkpoint.start import open_weights
from zjax.checkpoint.store import Store
from zjax.config.load import load_config
from zjax.data import read_record
from zjax.data.prompts import Prompts
from zjax.generation.loading import Opened, plan_weights, read_decoder
from zjax.generation.sizes import has_room
from zjax.run.resume import STARTED_FROM, check_tokenizer, report_changes
from zjax.settings import schema
from zjax.settings.choices import value_at
from zjax.settings.schema import Config
from zjax.train.average import Part
from zjax.weights.files import tensor_name
from zjax.weights.source import cached

_SPLITS_WEIGHTS = 3
"""Stage of ZeRO that splits the weights."""


def open_run(
    config: Config, part: str, step: int, prompts: Prompts
) -> tuple[Opened, Part]:
    """Reads the weights of a checkpoint, and not the moments beside them.

    `config` has the settings of the run. Returns the kind of weights, too.
    """
    store = Store(os.path.join(config.directory, "checkpoints"))
    extra, config = store.extra(step), without_start(config)
    report_changes(extra, config, step)
    record = read_record(config.data, config.model.vocab_size)
    if record is not None:
        check_tokenizer(extra, record, config)
    source, chosen = open_weights(store, part, step, merges_adapters=False)
    names = {tensor_name(name): name for name in source.entries}
    model, plan = plan_weights(_unsplit(config))
    source, place = cached(source.renamed(names)), str(store.path(step))
    return read_decoder(model, plan, prompts, place, source=source), chosen


def fits_unsplit(config: Config) -> bool:
    """Whether devices have room for the weights of a run without ZeRO and offload."""
    if config.zero.offloads_state:
        return False
    _, plan = plan_weights(_unsplit(config))
    whole = sum(row.used_bytes for row in jax.tree.leaves(plan.compute))
    return config.zero.stage < _SPLITS_WEIGHTS or has_room(whole, num_copies=1)


def without_start(config: Config) -> Config:
    """Forgets what a run started from and learned by, which may be gone."""
    # A setting of adapters would turn them on in a run without adapters.
    start = {x: unset for x, unset in STARTED_FROM.items() if value_at(config, x)}
    return load_config(config, start, {"rl": None})


def _unsplit(config: Config) -> Config:
    """Changes settings so that the weights are split by `mesh` alone."""
    return dataclasses.replace(config, zero=schema.Zero(stage=0))
