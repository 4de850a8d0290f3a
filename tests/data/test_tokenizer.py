import numpy as np
import pytest
import tokenizers
from tokenizers import models

from zjax.data import tokenizer
from zjax.errors import DataError

TEXT = "def café(x):\n    return x  # ☕ <|endoftext|>\n"


@pytest.fixture
def bpe(tmp_path):
    library = tokenizer.train_bpe([TEXT] * 20, vocab_size=270)
    library.save(str(tmp_path / "tokenizer.json"))
    return tokenizer.load_tokenizer(tmp_path / "tokenizer.json")


def test_bytes_come_back():
    bytes_ = tokenizer.make_bytes()
    ids = bytes_.encode(TEXT)
    assert ids.tolist() == list(TEXT.encode())
    assert bytes_.decode(np.append(ids, bytes_.end_id)) == TEXT


def test_torn_characters_decode_to_the_replacement_sign():
    assert tokenizer.make_bytes().decode([104, 195]) == "h\ufffd"


def test_bpe_comes_back_in_fewer_tokens(bpe):
    ids = bpe.encode(TEXT)
    assert bpe.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())
    assert bpe.vocab_size == 270


def test_text_that_spells_the_end_token_is_text(bpe):
    """Fails if control tokens can be written by data."""
    assert bpe.end_id not in bpe.encode("a<|endoftext|>b")


def test_numbers_come_back():
    numbers = tokenizer.make_numbers(100)
    assert numbers.decode(numbers.encode("3 14 15")) == "3 14 15"


def test_text_is_no_number():
    with pytest.raises(DataError) as error:
        tokenizer.make_numbers(100).encode("def ")
    assert str(error.value) == (
        "prompt='def ' is not made of numbers, as the tokens of this run are; use "
        "some, such as '5 6 7'"
    )


def test_missing_file():
    with pytest.raises(DataError) as error:
        tokenizer.load_tokenizer("nowhere.json")
    expected = "tokenizer='nowhere.json' is not a file; give a tokenizer.json"
    assert str(error.value) == expected


def test_file_of_something_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(DataError) as error:
        tokenizer.load_tokenizer("other.json")
    assert str(error.value).startswith(
        "tokenizer='other.json' is not a file of the tokenizers library ("
    )
    assert str(error.value).endswith("); give a tokenizer.json")


def test_vocabulary_without_an_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save("a.json")
    with pytest.raises(DataError) as error:
        tokenizer.load_tokenizer("a.json")
    assert str(error.value) == (
        "tokenizer='a.json' has no token that ends a document; add one of "
        "<|endoftext|>, <|end_of_text|>, <|eos|>, <eos>, </s>"
    )


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


@pytest.mark.parametrize("content", [b"", b"[" * 10**5, b"\xff", b"{}"])
def test_a_file_that_is_no_tokenizer_is_named(content, tmp_path):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError) as error:
        tokenizer.load_tokenizer(tmp_path / "t.json")
    assert str(error.value).startswith(f"tokenizer='{tmp_path / 't.json'}' ")
