"""Conversations: the template's text, a loss on answers alone, packed without leaks."""

import json

import jax
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support import small_run
from zjax.config.load import load_config
from zjax.data import chat, prepare, source
from zjax.data.tokenizer import train_bpe
from zjax.errors import DataError

TEMPLATE = "".join(
    (
        "{% for message in messages %}",
        "{% if message['role'] not in ['system', 'user', 'assistant'] %}",
        "{{ raise_exception('no such role: ' + message['role']) }}{% endif %}",
        "{{ bos_token + message['role'] + '\\n' }}",
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}",
        "{{ '\\n' }}{% endfor %}",
        "{% if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}",
    )
)
TALKS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is two and two?"},
        {"role": "assistant", "content": "Four <b>exactly</b>"},
        {"role": "user", "content": "And three?"},
        {"role": "assistant", "content": "Seven"},
    ],
    [
        {"role": "user", "content": "Name a colour"},
        {"role": "assistant", "content": "Blue, ünlike red"},
    ],
]
PAIR = {"prompt": "Say yes", "answer": "yes"}


def as_text(messages):
    turns = (f"<s>{m['role']}\n{m['content']}</s>\n" for m in messages)
    return "".join(turns)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tokenizer files of a checkpoint, whose turns begin and end as in ChatML."""
    folder = tmp_path_factory.mktemp("checkpoint")
    library = train_bpe([as_text(TALKS[0]), as_text(TALKS[1])], 300)
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    special = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    config = special | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def prepared(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    records = [{"messages": talk} for talk in TALKS] + [PAIR]
    lines = "\n".join(map(json.dumps, records))
    (folder / "talks.jsonl").write_text(lines)
    prepare.prepare(
        [folder / "talks.jsonl"],
        folder / "tokens",
        chat=str(checkpoint),
        validation_fraction=0.0,
    )
    return folder / "tokens"


def rows_of(path, length, **data):
    config = {"source": "tokens", "path": str(path), "length": length} | data
    settings = {"data": config, "model": {"max_length": length}}
    return source.open_rows(load_config(settings), "train")


def texts_where(keep, tokens, ids):
    """Decoded runs of adjacent tokens that are kept."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], keep, [0]])))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [tokens.decode(ids[i:j], skip_special_tokens=False) for i, j in pairs]


def test_only_answers_have_a_loss_and_no_segment_holds_two_talks(checkpoint, prepared):
    """Fails if a prompt is trained on, an end of turn is not, or talks are joined."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    rows = rows_of(prepared, 256, packing="documents")
    batch = rows.read(np.arange(len(rows)))
    talks, answers = [], []
    for row in range(len(rows)):
        ids, targets, weights, segments = (
            batch[name][row] for name in ("tokens", "targets", "weights", "segment_ids")
        )
        for segment in range(1, segments.max() + 1):
            own = segments == segment
            text = library.decode(ids[own], skip_special_tokens=False)
            talks.append(text)
            answers.append(texts_where(weights[own] > 0, library, targets[own]))
    pair = [{"role": "user", "content": "Say yes"}]
    pair.append({"role": "assistant", "content": "yes"})
    expected = {
        as_text(talk): [
            f"{m['content']}</s>\n" for m in talk if m["role"] == "assistant"
        ]
        for talk in (*TALKS, pair)
    }
    assert dict(zip(talks, answers, strict=True)) == expected


def test_parquet_has_the_same_tokens(checkpoint, prepared, tmp_path):
    """Fails if columns of structs are read otherwise than lines."""
    pair = [{"role": "user", "content": "Say yes"}]
    pair.append({"role": "assistant", "content": "yes"})
    table = pyarrow.table({"messages": [*TALKS, pair]})
    parquet.write_table(table, tmp_path / "talks.parquet")
    prepare.prepare(
        [tmp_path / "talks.parquet"],
        tmp_path / "tokens",
        chat=str(checkpoint),
        validation_fraction=0.0,
    )
    for name in ("train.bin", "train.idx", "train.answers"):
        written = (tmp_path / "tokens" / name).read_bytes()
        assert written == (prepared / name).read_bytes()


def test_run_trains_on_answers(prepared, tmp_path):
    """Fails if a run weighs the tokens of prompts."""
    rows = rows_of(prepared, 64, packing="documents")
    weight = rows.read(np.arange(len(rows)))["weights"].sum(axis=1)
    settings = (
        *("data.source=tokens", f"data.path={prepared}", "data.packing=documents"),
        *("data.length=64", "model.max_length=64", "model.vocab_size=400"),
        *("num_steps=2", "evaluation.num_batches=0", "global_batch_size=2"),
    )
    trainer = small_run.make_trainer(tmp_path, *settings, num_devices=1)
    batch = next(iter(trainer.loader))
    assert float(jax.numpy.sum(batch["weights"])) <= 2 * weight.max()
    trainer.fit()
    trainer.close()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "x"}, "has neither messages nor prompt and answer in record 1, only"),
        ({"messages": []}, "has messages without a role or a content in record 1"),
        (
            {"messages": [{"role": "user"}]},
            "has messages without a role or a content in record 1",
        ),
        (
            {"messages": TALKS[1][:1]},
            "finds no answer in a conversation; leave it out",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}, *TALKS[1]]},
            "has a chat template that refuses messages (no such role: tool)",
        ),
    ],
)
def test_unusable_conversation_is_told(record, expected, checkpoint, tmp_path):
    """Fails if it is dropped, or half a directory stays."""
    (tmp_path / "talks.jsonl").write_text(json.dumps(record))
    with pytest.raises(DataError) as caught:
        prepare.prepare(
            [tmp_path / "talks.jsonl"],
            tmp_path / "tokens",
            chat=str(checkpoint),
            validation_fraction=0.0,
        )
    assert expected in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["talks.jsonl"]


def test_rows_without_documents_are_refused(prepared):
    """Fails if blocks train on prompts."""
    with pytest.raises(DataError) as caught:
        rows_of(prepared, 16)
    assert str(caught.value) == (
        f"data.packing='blocks' takes all tokens of {prepared}/train.bin for answers; "
        "use 'documents'"
    )


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer_config.json", "{}", "has no chat template"),
        ("tokenizer_config.json", "[", "has no tokenizer_config.json that can be read"),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": "{% if %}"}),
            "has a chat template that cannot be read (Expected an expression",
        ),
        ("tokenizer.json", "{}", "has a tokenizer.json that is not of the tokenizers"),
    ],
)
def test_checkpoint_without_a_template_is_told(
    name, content, expected, checkpoint, tmp_path
):
    """Fails if a broken file is an error of a library."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        chat.load_chat(str(tmp_path))
    assert expected in str(caught.value)
