"""Tokenizers in the files of a checkpoint, small enough to write in a test."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from zjax.data import tokenizer


def write_checkpoint(folder, special=(), prefix=None, **files):
    """Writes a tokenizer of bytes and special tokens in the files of a checkpoint."""
    vocabulary = {x: n for x, n in tokenizer.byte_vocabulary().items() if n < 256}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([*special])
    if prefix:
        pair = prefix, library.token_to_id(prefix)
        library.post_processor = processors.TemplateProcessing(
            single=f"{prefix} $A", special_tokens=[pair]
        )
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return tokenizer.load_tokenizer(folder / "tokenizer.json")
