"""Takes the vocabulary size of a model from prepared data."""

import dataclasses
import pathlib

from zjax.config import derived, schema
from zjax.reading import parse_json, read_text

META_NAME = "meta.json"
"""Name of the metadata file that `zjax data prepare` writes."""


def with_vocabulary(config: schema.Config) -> schema.Config:
    """Sets an open `model.vocab_size` to that of the prepared data.

    Returns:
        The config, unchanged if the data is not on this machine, so that a run can be
        planned elsewhere.
    """
    is_open = derived.is_derived(config.model.vocab_size)
    if not is_open or config.data.source != "tokens" or not config.data.path:
        return config
    try:
        meta = parse_json(read_text(pathlib.Path(config.data.path) / META_NAME))
        sizes = meta["tokenizer"] if "vocab_size" not in meta else meta  # format 1
        size = derived.Size(sizes["vocab_size"])
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # reported when the data is opened
        return config
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=size)
    )
