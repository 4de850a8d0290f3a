"""Text that comes token by token, against the decoding of all tokens at once."""

import itertools

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from zjax.data import tokenizer
from zjax.generation.text import TextStream

TEXT = "Ein Café ☕ für 中文字 und 😀😀, oder नमस्ते. \n\tNo more!"
BYTES = tokenizer.make_bytes()


def load(library, folder):
    library.save(str(folder / "tokenizer.json"))
    return tokenizer.load_tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    library = tokenizer.train_bpe([TEXT] * 20, vocab_size=300)
    return load(library, tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A vocabulary of pieces with leading spaces, and of bytes, as of SentencePiece."""
    words = ["▁", "▁a", "b", "▁caf", "é", "☕", "▁▁", "c▁"]
    names = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {name: number for number, name in enumerate(names)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    library.add_special_tokens(["</s>"])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return load(library, tmp_path_factory.mktemp("pieces"))


def write(stream, ids):
    """Text of each token, and of the flush behind them."""
    return [*(stream.push(token)[0] for token in ids), stream.flush()]


def check_whole(vocabulary, ids):
    told = write(TextStream(vocabulary), ids)
    assert "".join(told) == vocabulary.decode(ids)
    assert TextStream(vocabulary).write(ids) == vocabulary.decode(ids)
    return told


def random_ids(vocabulary, seed, size=300):
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocabulary.vocab_size, size).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_random_ids_tell_the_decoding_of_all(seed, bpe):
    """Most bytes are no characters, and end tokens have no text."""
    for vocabulary in (BYTES, bpe, tokenizer.make_numbers(50)):
        check_whole(vocabulary, random_ids(vocabulary, seed))


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_of_characters_tell_the_decoding_of_all(seed):
    """Bytes that begin, continue or break characters of 2 to 4 bytes."""
    parts = [0x41, 0xC3, 0xA9, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x80, 0xEF, 0xBF]
    parts += [0xBD, 0xFF, 256]
    ids = np.random.default_rng(seed).choice(parts, 400).tolist()
    check_whole(BYTES, ids)


@pytest.mark.parametrize("seed", range(8))
def test_random_pieces_tell_the_decoding_of_all(seed, pieces):
    """Fails if a window of tokens loses or gains a space."""
    rng = np.random.default_rng(seed)
    character = [[1 + byte for byte in each.encode()] for each in "é中😀\n"]
    parts = [*character, *([token] for token in (0, *range(257, pieces.vocab_size)))]
    numbers = rng.integers(0, len(parts), 300)
    check_whole(pieces, [*itertools.chain(*(parts[n] for n in numbers))])


def test_bytes_without_another_token_between_are_characters(pieces):
    """Fails if a window begins inside a character, which would break all bytes."""
    for text in ("中" * 100, "é😀" * 60, "a中é" * 50):
        told = check_whole(pieces, [1 + byte for byte in text.encode()])
        assert [each for each in told if each] == [*text]


def test_a_character_is_told_with_its_last_byte(bpe):
    for vocabulary in (BYTES, bpe):
        ids = vocabulary.encode(TEXT).tolist()
        told = check_whole(vocabulary, ids)
        assert told[-1] == ""
        for number in range(len(ids)):
            known = vocabulary.decode(ids[: number + 1])
            if not known.endswith("\ufffd"):
                assert "".join(told[: number + 1]) == known


def test_bytes_that_become_no_character_are_told_before_the_end():
    """Fails if text waits, or time grows, while no text ends with a character."""
    told = check_whole(BYTES, [0xFF] * 5_000)
    assert sum(map(len, told[:-1])) == 5_000 - 3


def test_a_character_may_have_tokens_without_text_inside():
    """Fails if the first byte is forgotten, or told as no character."""
    check_whole(BYTES, [0x41, 0xE4, *[300] * 60, 0xB8, 0xAD, 0x42])


def test_tokens_of_a_long_text_decode_a_bounded_window(bpe, pieces):
    """Fails if a token decodes what came long before it."""
    decoded = []

    def count(vocabulary):
        def decode(ids):
            decoded.append(len(ids))
            return vocabulary.decode(ids)

        names = vocabulary.special_tokens
        return tokenizer.Tokenizer(vocabulary.record, bpe.encode_texts, decode, names)

    in_bytes = [1 + byte for byte in ("a中é" * 100).encode()]
    for vocabulary, ids in ((bpe, bpe.encode(TEXT * 20).tolist()), (pieces, in_bytes)):
        silent = [vocabulary.end_id] * 500
        stream = TextStream(count(vocabulary), prompt=ids + silent)
        decoded.clear()
        told = "".join(write(stream, ids + silent + ids))
        assert told == vocabulary.decode(ids + ids)
        assert max(decoded) <= 40 and sum(decoded) < 40 * 2 * len(ids)


def test_the_first_token_decodes_behind_the_prompt(pieces):
    """Its space is text behind a prompt, and none at the start of a text."""
    a, b = (257 + number for number in (1, 2))
    assert write(TextStream(pieces), [a, b]) == ["a", "b", ""]
    for prompt in ([b], [b] * 50, [1 + byte for byte in ("中" * 50).encode()]):
        stream = TextStream(pieces, prompt=prompt)
        assert write(stream, [a, b]) == [" a", "b", ""]


def expected_end(text, stops):
    """Text before the stop string that is complete first, and the stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


STOPS = {
    "across-tokens": (" Café", "für "),
    "bytes": ("文", "😀"),
    "second-of-two": ("😀😀, o", "never"),
    "at-the-start": ("Ein",),
    "whole": (TEXT,),
    "overlapping": ("字 und", "中文字 u", "文字"),
    "one-in-another": ("oder", "de"),
    "ends-together": ("fé", "Café", "é"),
    "none": ("More!", "No more!!"),
    "first-character": ("E",),
    "last-character": ("!",),
}


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_stop_strings_end_the_text(stops, bpe, pieces):
    text, ended_by = expected_end(TEXT, stops)
    cases = [(v, v.encode(TEXT).tolist()) for v in (BYTES, bpe)]
    cases.append((pieces, [1 + byte for byte in TEXT.encode()]))
    for vocabulary, ids in cases:
        stream = TextStream(vocabulary, stops)
        pushed = [stream.push(token) for token in ids]
        told = "".join(each for each, _ in pushed)
        assert told + stream.flush() == text
        assert stream.ended_by == ended_by
        ended = [flag for _, flag in pushed]
        assert ended == sorted(ended) and ended[-1] == (ended_by is not None)
        # The text is over with the last byte of the stop string, not later.
        length = 0 if ended_by is None else len((text + ended_by).encode())
        if vocabulary is BYTES and ended_by:
            assert ended.index(True) == length - 1


@pytest.mark.parametrize("seed", range(20))
def test_random_stop_strings_end_random_texts(seed):
    """Few letters, so that stop strings begin again and again within themselves."""
    rng = np.random.default_rng(seed)

    def draw(size):
        return "".join(rng.choice([*"ab中"], size))

    text, stops = draw(40), [draw(rng.integers(2, 7)) for _ in range(3)]
    wanted, ended_by = expected_end(text, stops)
    stream = TextStream(BYTES, stops)
    assert "".join(write(stream, text.encode())) == wanted
    assert stream.ended_by == ended_by


def test_the_stop_string_that_is_complete_first_ends_a_token_of_many_letters():
    stream = TextStream(tokenizer.make_numbers(10**6), ["1234", "23"])
    assert stream.push(12345) == ("1", True)
    assert stream.ended_by == "23"


def test_only_what_may_begin_a_stop_string_is_held_back():
    stream = TextStream(BYTES, ["abab!"])
    told = [stream.push(token)[0] for token in b"xaababab?"]
    assert told == ["x", "", "a", "", "", "", "ab", "", "abab?"]


def test_a_stop_string_ends_in_the_flush():
    """Characters that are none are final at the end of the text alone."""
    stream = TextStream(BYTES, ["\ufffd"])
    assert [stream.push(token)[0] for token in (0x41, 0xFF)] == ["A", ""]
    assert stream.flush() == "" and stream.ended_by == "\ufffd"


def test_nothing_follows_the_end():
    stream = TextStream(BYTES, ["b"])
    assert [stream.push(token) for token in b"ab"] == [("a", False), ("", True)]
    assert stream.push(0x63) == ("", True) and stream.flush() == ""
