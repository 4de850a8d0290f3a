"""How many tokens a model is to know, where prepared data says it."""

import dataclasses
import pathlib

from zjax.config import derived, schema
from zjax.reading import parse_json, read_text

META_NAME = "meta.json"
"""In a directory made by `zjax data prepare`."""


def with_vocabulary(config: schema.Config) -> schema.Config:
    """Takes the vocabulary of prepared data, where `model.vocab_size` is not set.

    Args:
        config: Read for `data` and `model.vocab_size`.

    Returns:
        The settings with that vocabulary; as they are where there is no such data here,
        so that a run can be planned elsewhere.
    """
    is_open = derived.is_derived(config.model.vocab_size)
    if not is_open or config.data.source != "tokens" or not config.data.path:
        return config
    try:
        meta = parse_json(read_text(pathlib.Path(config.data.path) / META_NAME))
        size = derived.Size(meta["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):  # told when the data is opened
        return config
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=size)
    )
