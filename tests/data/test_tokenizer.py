import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from tests.support.refusals import data_error
from tests.support.tokens import write_checkpoint
from zjax.data import tokenizer
from zjax.data.tokenizer_files import TokenizerFiles, TokenizerRecord, copy_files
from zjax.errors import DataError

TEXT = "def café(x):\n    return x  # ☕ <|endoftext|>\n"


@pytest.fixture
def bpe(tmp_path):
    library = tokenizer.train_bpe([TEXT] * 20, vocab_size=270)
    library.save(str(tmp_path / "tokenizer.json"))
    return tokenizer.load_tokenizer(tmp_path / "tokenizer.json")


def test_texts_come_back_from_bytes_and_merges(bpe):
    """Fails if control tokens can be written by data."""
    bytes_ = tokenizer.make_bytes()
    ids = bytes_.encode(TEXT)
    assert ids.tolist() == list(TEXT.encode())
    assert bytes_.decode(np.append(ids, bytes_.end_id)) == TEXT
    assert bytes_.decode([104, 195]) == "h\ufffd"  # half a character
    ids = bpe.encode(TEXT)
    assert bpe.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())
    assert bpe.vocab_size == 270
    assert bpe.end_id not in bpe.encode("a<|endoftext|>b")


def test_numbers_come_back_and_text_is_none():
    numbers = tokenizer.make_numbers(100)
    assert numbers.decode(numbers.encode("3 14 15")) == "3 14 15"
    with data_error(
        "prompt='def ' is not made of numbers, as the tokens of this run are; use "
        "some, such as '5 6 7'"
    ):
        numbers.encode("def ")


def test_files_that_are_missing_or_have_no_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with data_error("tokenizer='nowhere.json' is not a file; give a tokenizer.json"):
        tokenizer.load_tokenizer("nowhere.json")
    tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save("a.json")
    with data_error(
        "tokenizer='a.json' has no token that ends a document; name one as eos_token "
        "in the tokenizer_config.json beside it (read if the file is called "
        "tokenizer.json), or add one of <|endoftext|>, <|end_of_text|>, <|eos|>, "
        "<eos>, </s>"
    ):
        _ = tokenizer.load_tokenizer("a.json").end_id


def test_ids_beyond_any_vocabulary_are_refused(bpe, tmp_path):
    """Fails if 4 billion tokens are taken for the size of a vocabulary."""
    path = tmp_path / "tokenizer.json"
    text = path.read_text().replace('"<|endoftext|>": 0', '"<|endoftext|>": 4000000000')
    path.write_text(text.replace('"id": 0', '"id": 4000000000'))
    with pytest.raises(DataError, match="has token id 4000000000; use ids below"):
        tokenizer.load_tokenizer(path)


def test_a_text_that_a_tokenizer_cannot_encode_is_an_error_of_its_own(tmp_path):
    vocabulary = {"</s>": 0, "a": 1}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="none"))
    library.save(str(tmp_path / "t.json"))
    loaded = tokenizer.load_tokenizer(tmp_path / "t.json")
    with pytest.raises(DataError, match="cannot encode a text"):
        loaded.encode("b")


@pytest.mark.parametrize("content", [b"", b"[" * 10**5, b"\xff", b"{}", b"[]"])
def test_a_file_that_is_no_tokenizer_is_named(content, tmp_path):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError) as error:
        tokenizer.load_tokenizer(tmp_path / "t.json")
    told, path = str(error.value), tmp_path / "t.json"
    assert told.startswith(f"tokenizer='{path}' ")
    assert content != b"[]" or "is not a file of the tokenizers library (" in told


MARKS = ("<s>", "</s>", "<|end|>")


@pytest.mark.parametrize(
    ("prefix", "config", "bos_id"),
    [
        ("<s>", {}, 256),
        (None, {}, None),
        ("<s>", {"add_bos_token": False, "bos_token": "<s>"}, None),
        (None, {"add_bos_token": True, "bos_token": {"content": "<s>"}}, 256),
    ],
)
def test_texts_begin_as_the_files_of_a_tokenizer_say(tmp_path, prefix, config, bos_id):
    """Fails if documents and prompts lack a BOS, or get two."""
    made = write_checkpoint(tmp_path, MARKS, prefix, tokenizer_config=config)
    start = [] if bos_id is None else [bos_id]
    assert made.bos_id == bos_id
    assert made.encode("a").tolist() == [*start, 97]
    assert made.encode("<s>a", special_tokens=True).tolist() == [256, 97]


@pytest.mark.parametrize(
    ("files", "end_ids"),
    [
        ({}, (257,)),
        ({"tokenizer_config": {"eos_token": "<|end|>"}}, (258,)),
        ({"generation_config": {"eos_token_id": [258, 257]}}, (258, 257)),
        (
            {
                "tokenizer_config": {"eos_token": {"content": "</s>"}},
                "generation_config": {"eos_token_id": 258},
            },
            (257, 258),
        ),
        ({"config": {"eos_token_id": 258}}, (258,)),
        ({"generation_config": {"eos_token_id": [258, 999]}}, (258,)),
        ({"tokenizer_config": {"eos_token": "<missing>"}}, (257,)),
    ],
)
def test_texts_end_as_the_files_of_a_tokenizer_say(tmp_path, files, end_ids):
    """Fails if the first known name ends texts, whatever the checkpoint says."""
    assert write_checkpoint(tmp_path, MARKS, **files).end_ids == end_ids


def test_an_end_that_is_no_id_and_a_bos_that_is_no_token_are_refused(tmp_path):
    with data_error(
        f"tokenizer='{tmp_path}/generation_config.json' has eos_token_id='</s>', which "
        "is no id and no list of ids; correct it, or give the tokenizer files of a "
        "checkpoint"
    ):
        write_checkpoint(tmp_path, MARKS, generation_config={"eos_token_id": "</s>"})
    (tmp_path / "generation_config.json").unlink()
    config = {"add_bos_token": True, "bos_token": "<missing>"}
    with data_error(
        f"tokenizer='{tmp_path}/tokenizer_config.json' has add_bos_token, but the "
        "vocabulary lacks bos_token='<missing>'; correct it, or give the tokenizer "
        "files of a checkpoint"
    ):
        write_checkpoint(tmp_path, MARKS, tokenizer_config=config)


def test_records_tell_vocabularies_and_templates_apart(tmp_path):
    """Fails if two tokenizers of one size have one digest, or one tokenizer has two."""
    one = write_checkpoint(tmp_path / "1", MARKS).record
    path = tmp_path / "1" / "tokenizer.json"
    (tmp_path / "same.json").write_text(json.dumps(json.loads(path.read_text())))
    same = tokenizer.load_tokenizer(tmp_path / "same.json").record
    other = write_checkpoint(tmp_path / "2", MARKS[::-1]).record
    config = {"chat_template": "{{ messages }}"}
    chat = write_checkpoint(tmp_path / "3", MARKS, tokenizer_config=config).record
    assert one.digest == same.digest == chat.digest
    assert one.vocab_size == other.vocab_size and one.digest != other.digest
    assert chat.template_digest and not one.template_digest
    assert tokenizer.load_tokenizer(path, chat).record == chat
    with data_error(
        f"tokenizer='{path}' has other tokens than '{other.name}', which made the "
        "token ids; put the tokenizer.json back that was there, or prepare the text "
        "again"
    ):
        tokenizer.load_tokenizer(path, other)


def test_templates_whose_names_are_no_text_are_left_out(tmp_path):
    templates = [{"name": ["x"], "template": "a"}, {"name": "default", "template": "b"}]
    write_checkpoint(tmp_path, tokenizer_config={"chat_template": templates})
    files = TokenizerFiles(tmp_path / "tokenizer.json")
    assert files.templates() == {"default": "b"}


def test_the_template_of_tools_may_be_a_file(tmp_path):
    """Fails if it is left behind, and tools go through the default template."""
    write_checkpoint(tmp_path, tokenizer_config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("a")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("b")
    (tmp_path / "copy").mkdir()
    copy_files(tmp_path / "tokenizer.json", tmp_path / "copy")
    for folder in (tmp_path, tmp_path / "copy"):
        files = TokenizerFiles(folder / "tokenizer.json")
        assert files.templates() == {"default": "a", "tool_use": "b"}


def test_bytes_are_the_same_vocabulary_as_a_file(tmp_path):
    """Fails if an export of a run on bytes would look like another tokenizer, or
    `eos_token_id` is an empty list, at which no library ends a text."""
    assert write_checkpoint(tmp_path / "endless").record.config_ids() == {}
    made = write_checkpoint(tmp_path, ["<|endoftext|>"])
    assert made.record.digest == tokenizer.make_bytes().record.digest


def test_a_record_with_a_damaged_field_is_refused():
    good = tokenizer.make_bytes().record.to_mapping()
    damages = ({"end_ids": [257]}, {"bos_id": -1}, {"vocab_size": True}, {"name": 1})
    for damage in damages:
        with pytest.raises(ValueError, match="a field of the tokenizer record is out"):
            TokenizerRecord.from_mapping(good | damage)
