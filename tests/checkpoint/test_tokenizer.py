"""The tokenizer of a checkpoint is compared with the data, and exported."""

import dataclasses
import json

import pytest

from tests.support import huggingface as golden
from tests.support import tokens
from tests.support.refusals import config_error
from zjax.checkpoint import tokenizer
from zjax.config.load import load_config
from zjax.data import prepare
from zjax.data.tokenizer import load_tokenizer, make_bytes
from zjax.errors import ConfigError, DataError
from zjax.run.trainer import Trainer

MARKS = ("<s>", "</s>", "<|end|>")


def prepared(tmp_path, name="data", **options):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    options = {"validation_fraction": 0.0} | options
    prepare.prepare([tmp_path / "a.jsonl"], tmp_path / name, **options)
    return {"data.source": "tokens", "data.path": str(tmp_path / name)}


@pytest.fixture
def checkpoint(tmp_path):
    """A Hugging Face checkpoint with a tokenizer of 259 tokens."""
    folder = golden.copy("mistral", tmp_path / "start", eos_token_id=257)
    tokens.write_checkpoint(folder, MARKS, tokenizer_config={"eos_token": "</s>"})
    return folder


def check(folder, **settings):
    config = load_config(settings)
    starts = {
        "checkpoint.init_from": str(folder),
        "distill.teacher": settings.get("distill.teacher", ""),
    }
    tokenizer.check_start(starts, config.data, config.model.vocab_size)


def test_data_of_another_tokenizer_is_refused(checkpoint, tmp_path):
    """Fails if a run trains a checkpoint on ids that mean other tokens."""
    tokens.write_checkpoint(tmp_path / "other", MARKS[::-1])
    path = tmp_path / "other" / "tokenizer.json"
    data = prepared(tmp_path, tokenizer=str(path))
    expected = (
        f"data.path='{tmp_path / 'data'}' has another tokenizer than "
        f"checkpoint.init_from='{checkpoint}': id 256 is '<|end|>', and '<s>' there; "
        f"prepare text with --tokenizer={checkpoint / 'tokenizer.json'}, or "
        f"conversations with --chat={checkpoint}"
    )
    with config_error(expected):
        check(checkpoint, **data)
    with pytest.raises(ConfigError, match="has another tokenizer than distill"):
        check("", **data, **{"distill.teacher": str(checkpoint)})
    config = golden.make_config("mistral", data, directory=checkpoint)
    with config_error(expected):
        Trainer(load_config(config, {"directory": str(tmp_path / "run")}))


def test_data_of_the_same_tokenizer_is_taken(checkpoint, tmp_path, caplog):
    """Fails if formats of the file or new tokens are taken for another tokenizer."""
    check(checkpoint, **prepared(tmp_path, tokenizer=f"{checkpoint}/tokenizer.json"))
    assert caplog.messages == []
    tokens.write_checkpoint(tmp_path / "more", (*MARKS, "<|user|>"), prefix="<s>")
    options = {"tokenizer": str(tmp_path / "more" / "tokenizer.json")}
    check(checkpoint, **prepared(tmp_path, "more_tokens", **options))
    assert caplog.messages == [
        "the data has 1 tokens more than the checkpoint, first '<|user|>', id 259"
    ]
    config = {"add_bos_token": True, "bos_token": "<s>"}
    tokens.write_checkpoint(tmp_path / "bos", MARKS, tokenizer_config=config)
    options = {"tokenizer": str(tmp_path / "bos" / "tokenizer.json")}
    check(checkpoint, **prepared(tmp_path, "begun", **options))
    assert caplog.messages[1:] == [
        f"texts of data.path='{tmp_path / 'begun'}' and of "
        f"checkpoint.init_from='{checkpoint}' begin with other ids: 256 and None"
    ]


def test_what_cannot_be_compared_is_told(checkpoint, tmp_path, caplog):
    """Fails if the default data trains a checkpoint without a word."""
    check(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    check(checkpoint, **prepared(tmp_path))
    assert caplog.messages == [
        "data.source='standard_library' has the tokenizer 'bytes', "
        f"checkpoint.init_from='{checkpoint}' has '{checkpoint}/tokenizer.json': ids "
        "mean other tokens than before; prepare text with the tokenizer of the "
        "checkpoint",
        f"checkpoint.init_from='{checkpoint}' has no tokenizer that zjax reads: "
        f"nothing compares it with data.path='{tmp_path / 'data'}'",
    ]


def exported(folder, record, directory, start=None):
    folder.mkdir()
    path = directory / "tokenizer" / "tokenizer.json"
    trained = tokenizer.CheckpointTokenizer(record, path)
    values = tokenizer.write_tokenizer(folder, trained, start)
    return values, sorted(file.name for file in folder.iterdir())


def test_an_export_has_the_tokenizer_that_was_trained(checkpoint, tmp_path, caplog):
    """Fails if the tokenizer, template or end ids of the base go out instead."""
    (checkpoint / "merges.txt").write_text("")
    (checkpoint / "chat_template.jinja").write_text("old")
    new = tmp_path / "new"
    tokens.write_checkpoint(new, (*MARKS, "<|user|>"))
    (new / "chat_template.jinja").write_text("new")
    config = load_config(prepared(tmp_path, tokenizer=str(new / "tokenizer.json")))
    tokenizer.keep_tokenizer(config.data, tmp_path / "run")
    record = load_tokenizer(new / "tokenizer.json").record.with_ends([258])
    out = tmp_path / "out"
    values, names = exported(out, record, tmp_path / "run", checkpoint)
    assert values == {"eos_token_id": [257, 258]}
    assert names == ["chat_template.jinja", "generation_config.json", "tokenizer.json"]
    assert (out / "chat_template.jinja").read_text() == "new"
    assert load_tokenizer(out / "tokenizer.json").record.digest == record.digest
    assert load_tokenizer(out / "tokenizer.json").end_ids == (257, 258)
    assert caplog.messages == [
        "tokenizer: tokenizer.json, chat_template.jinja, generation_config.json of "
        f"{tmp_path / 'run' / 'tokenizer'}"
    ]
    same = load_tokenizer(checkpoint / "tokenizer.json").record
    with pytest.raises(DataError, match="has other tokens than"):
        exported(tmp_path / "mixed", same, tmp_path / "run", checkpoint)
    earlier = dataclasses.replace(same, end_ids=(256,))  # as an earlier zjax knew it
    out = tmp_path / "same"
    values, names = exported(out, earlier, tmp_path / "none", checkpoint)
    assert values["eos_token_id"] == [256, 257] and "merges.txt" in names
    assert load_tokenizer(out / "tokenizer.json").end_ids == (257, 256)


def test_a_run_from_scratch_goes_out_with_its_tokenizer(tmp_path, caplog):
    """Fails if a learnt vocabulary, or that of bytes, stays behind."""
    config = load_config(prepared(tmp_path, tokenizer="bpe:258"))
    tokenizer.keep_tokenizer(config.data, tmp_path / "run")
    record = load_tokenizer(tmp_path / "data" / "tokenizer.json").record
    values, names = exported(tmp_path / "out", record, tmp_path / "run")
    assert values == {"eos_token_id": 0}
    expected = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert names == expected
    given = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert given["eos_token"] == "<|endoftext|>"
    record = make_bytes().record
    values, names = exported(tmp_path / "bytes", record, tmp_path / "none")
    assert (values, names) == ({"eos_token_id": 256}, expected)
    read = load_tokenizer(tmp_path / "bytes" / "tokenizer.json")
    assert read.record.digest == record.digest
    assert read.encode("hé").tolist() == [104, 195, 169]
    assert read.decode([104, 195, 169, 256]) == "hé"
    missing = load_tokenizer(tmp_path / "data" / "tokenizer.json").record
    _, names = exported(tmp_path / "missing", missing, tmp_path / "none")
    assert names == []
    assert caplog.messages[-1] == (
        f"tokenizer: {tmp_path / 'none' / 'tokenizer' / 'tokenizer.json'} is missing; "
        "the export has no tokenizer"
    )
