"""Examples: records of all layouts, prepared, checked and packed into rows."""

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support.command_line import typed
from tests.support.refusals import data_error, listed
from zjax.cli import data_commands
from zjax.config.load import load_config
from zjax.data import prepare, source, store
from zjax.data.example_rows import ExampleRows, ReferencedRows
from zjax.data.examples import read_example
from zjax.data.tokenizer import train_bpe
from zjax.errors import DataError

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
REFUSALS = listed("examples.txt")


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tokenizer and the chat template of a checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    library = train_bpe(["user assistant system why who me you a b c d"], 270)
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def write(records, **settings):
    """Prepares records of a.jsonl; returns the training split."""
    lines = [json.dumps(record) for record in records]
    with open("a.jsonl", "w") as file:
        file.write("\n".join(lines))
    settings = {"validation_fraction": 0.0} | settings
    prepare.prepare(["a.jsonl"], "out", **settings)
    return store.open_store("out", "train")


def texts(opened):
    """Text of each document, with the part that has a loss in brackets."""
    tokenizer, found = store.open_tokenizer("out"), []
    for start, end in zip(opened.offsets[:-1], opened.offsets[1:], strict=True):
        ids, loss = opened.tokens[start:end], opened.answers[start:end].astype(bool)
        # Bytes, or special tokens of a template, which decoding would skip.
        names = {x: name for name, x in tokenizer.special_tokens.items()}
        names |= {tokenizer.end_id: names.get(tokenizer.end_id, "$")}
        pieces = [names.get(int(x)) or tokenizer.decode([int(x)]) for x in ids]
        first = int(loss.argmax())
        assert loss[first:].all()
        found.append(f"{''.join(pieces[:first])}[{''.join(pieces[first:])}]")
    return found


@pytest.mark.parametrize(
    ("kind", "record", "expected"),
    [
        (
            "pairs",
            {"prompt": "who?", "chosen": " me", "rejected": " you"},
            ["who?[ me$]", "who?[ you$]"],
        ),
        (
            "pairs",
            {"chosen": "Q: who?\nA: I am", "rejected": "Q: who?\nA: I do"},
            ["Q: who?\nA: I[ am$]", "Q: who?\nA: I[ do$]"],
        ),
        (
            "ranked",
            {"prompt": "a", "completions": ["b", "c", "d"], "scores": [1, 3.5, 2]},
            ["a[c$]", "a[d$]", "a[b$]"],
        ),
        ("completions", {"prompt": "a", "completion": "b"}, ["a[b$]"]),
        ("completions", {"prompt": "a", "chosen": "b", "rejected": "c"}, ["a[b$]"]),
    ],
)
def test_texts_become_sequences_with_a_loss_on_completions(kind, record, expected):
    opened = write([record], examples=kind)
    assert texts(opened) == expected
    assert opened.kind == ("" if kind == "completions" else kind)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [user("a")], "chosen": [answer("b")], "rejected": [answer("c")]},
        {"prompt": "a", "chosen": [answer("b")], "rejected": [answer("c")]},
        {"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("c")]},
        {
            "prompt": "a",
            "chosen": [user("a"), answer("b")],
            "rejected": [user("a"), answer("c")],
        },
    ],
)
def test_layouts_of_pairs_mean_the_same_to_a_template(record, checkpoint):
    opened = write([record], examples="pairs", chat=checkpoint)
    start = "<s>user a</s><s>assistant "
    assert texts(opened) == [f"{start}[b</s>]", f"{start}[c</s>]"]


@pytest.mark.parametrize("kind", ["completions", "labels", "pairs"])
def test_a_prompt_is_kept_where_completions_share_their_first_answer(kind):
    """Fails if messages that follow the prompt are read as the prompt."""
    system = {"role": "system", "content": "d"}
    given, looks = [system, user("a")], answer("b")
    ends = ["c", "me"] if kind == "pairs" else ["c"]
    names = ["chosen", "rejected"] if kind == "pairs" else ["completion"]
    values = [[system, looks, answer(end)] for end in ends]
    record = {"prompt": "a", "label": True, **dict(zip(names, values, strict=True))}
    found = read_example(record, "a", "line 1", kind=kind, has_template=True)
    assert found.num_asked == len(given)
    for talk, end in zip(found.sequences, ends, strict=True):
        assert talk.messages == [*given, looks, answer(end)]
        assert talk.trained == [False, False, True, True]


def test_only_answers_after_the_prompt_have_a_loss(checkpoint):
    """Fails if an answer of the prompt is trained."""
    asked = [user("a"), answer("b"), user("c")]
    record = {"system": "d", "chosen": [*asked, answer("me")]}
    record["rejected"] = [*asked, answer("you")]
    opened = write([record], examples="pairs", chat=checkpoint)
    start = "<s>system d</s><s>user a</s><s>assistant b</s><s>user c</s><s>assistant "
    assert texts(opened) == [f"{start}[me</s>]", f"{start}[you</s>]"]


def test_tables_hold_the_same_examples():
    records = [
        {"prompt": f"{n}", "chosen": f" {n}", "rejected": " x", "n": n}
        for n in range(9)
    ]
    write(records, examples="pairs")
    table = pyarrow.Table.from_pylist(records)
    parquet.write_table(table, "a.parquet")
    prepare.prepare(["a.parquet"], "table", examples="pairs", validation_fraction=0.0)
    first, second = (store.open_store(name, "train") for name in ("out", "table"))
    np.testing.assert_array_equal(first.tokens[:], second.tokens[:])
    np.testing.assert_array_equal(first.examples, second.examples)


def test_labels_stand_beside_a_completion_of_another_prompt(monkeypatch):
    """Fails if a completion is mismatched with its own prompt, also across chunks."""
    monkeypatch.setattr(prepare, "ENCODE_DOCUMENTS", 2)
    records = [
        {"prompt": f"{n}", "completion": c, "label": n % 2 == 0}
        for n, c in enumerate("abc")
    ]
    opened = write(records, examples="labels")
    assert texts(opened) == ["0[a$]", "0[b$]", "1[b$]", "1[a$]", "2[c$]", "2[b$]"]
    assert opened.labels.tolist() == [1, 0, 1]


def test_mismatched_completions_are_of_another_prompt(monkeypatch):
    """Fails if a completion of the prompt itself measures the divergence."""
    monkeypatch.setattr(prepare, "ENCODE_DOCUMENTS", 2)
    given = "xa", "xb", "xc", "yd", "ye", "xf"
    records = [{"prompt": p, "completion": c, "label": True} for p, c in given]
    opened = write(records, examples="labels")
    assert texts(opened)[0::2] == ["x[a$]", "x[b$]", "x[c$]", "y[d$]", "y[e$]", "x[f$]"]
    assert texts(opened)[1::2] == ["x[d$]", "x[d$]", "x[d$]", "y[c$]", "y[c$]", "x[e$]"]


def test_mismatched_completions_are_of_the_same_split():
    """Fails if training reads a completion that is held out."""
    # The second, and then each other, is held out.
    records = [
        {"prompt": f"{n}", "completion": c, "label": True} for n, c in enumerate("abcd")
    ]
    opened = write(records, examples="labels", validation_fraction=0.5)
    assert texts(opened) == ["0[a$]", "0[c$]", "2[c$]", "2[a$]"]
    held_out = store.open_store("out", "validation")
    assert texts(held_out) == ["1[b$]", "1[d$]", "3[d$]", "3[b$]"]


def test_a_split_of_one_prompt_has_no_divergence(tmp_path):
    records = [
        {"prompt": f"{n}", "completion": c, "label": True} for n, c in enumerate("abc")
    ]
    with data_error(
        "input='a.jsonl' has the only prompt of the split validation, and the "
        "divergence needs completions of another one in line 2; give records of more "
        "prompts, or another --validation_fraction"
    ):
        write(records, examples="labels", validation_fraction=0.1)
    assert not (tmp_path / "out").exists()


def test_labels_of_conversations_keep_their_prompts(checkpoint):
    """Fails if a mismatched completion brings its own prompt, or loses its loss."""
    records = [
        {"prompt": [user("a")], "completion": [answer("b")], "label": True},
        {"prompt": [user("c"), answer("d"), user("me")], "completion": [answer("you")]},
    ]
    records[1]["label"] = False
    opened = write(records, examples="labels", chat=checkpoint)
    first, second = "<s>user a</s>", "<s>user c</s><s>assistant d</s><s>user me</s>"
    assert texts(opened) == [
        f"{first}<s>assistant [b</s>]",
        f"{first}<s>assistant [you</s>]",
        f"{second}<s>assistant [you</s>]",
        f"{second}<s>assistant [b</s>]",
    ]


@pytest.mark.parametrize("given", REFUSALS, ids=REFUSALS)
def test_all_that_is_wrong_is_told_by_line(given, tmp_path):
    kind, _, records = given.partition(" ")
    with data_error(REFUSALS[given]):
        write(json.loads(records), examples=kind)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"chosen": "b", "rejected": "c"},
            "has texts without a prompt in line 1; write the prompt, or prepare it "
            "with --tokenizer, without --chat",
        ),
        (
            {"prompt": [user("a")], "chosen": "b", "rejected": "c"},
            "has a prompt and completions of different kinds in line 1; write two "
            "texts, or two lists of messages",
        ),
        (
            {"prompt": "a", "chosen": [answer("b")], "rejected": [{"content": "c"}]},
            "has no role in message 2 in 'rejected' of line 1; write "
            '{"role": "user", "content": "..."}',
        ),
        (
            {"prompt": [{"role": "user"}], "chosen": [answer("b")], "rejected": [{}]},
            "has no content in message 1 in line 1; write "
            '{"role": "user", "content": "..."}',
        ),
        (
            {"prompt": "a", "chosen": [answer("b")], "rejected": [user("c")]},
            "has no message of the role 'assistant', only of user, in 'rejected' of "
            "line 1; give it an answer, or leave it out",
        ),
    ],
)
def test_conversations_that_cannot_be_compared(record, message, checkpoint):
    with data_error(f"input='a.jsonl' {message}"):
        write([record], examples="pairs", chat=checkpoint)


def test_broken_examples_are_left_out_and_counted(caplog):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    opened = write([good, {"prompt": "a"}], examples="pairs", skip_broken=True)
    assert len(opened.examples) == 2
    assert "broken records that were left out: 1" in caplog.text


def test_problems_end_with_the_twentieth(monkeypatch):
    with pytest.raises(DataError) as error:
        write([{"prompt": "a"}] * 50, examples="pairs")
    assert len(error.value.problems) == prepare.MAX_PROBLEMS


PAIRS = [
    {"prompt": f"{n}?", "chosen": "y" * (n % 4 + 1), "rejected": "n" * (n % 3 + 1)}
    for n in range(23)
]


def test_the_command_prints_lengths_and_how_to_train(capsys):
    """A BPE learns from prompts and completions."""
    with open("a.jsonl", "w") as file:
        file.write("\n".join(map(json.dumps, PAIRS)))
    words = "--input=a.jsonl", "--output=out", "--examples=pairs", "--tokenizer=bpe:262"
    data_commands.prepare_data(typed("data prepare", *words))
    said = capsys.readouterr().out
    meta = store.read_meta("out")
    opened = store.open_store("out", "train")
    longest = int(np.diff(opened.offsets[opened.examples]).max())
    assert f"{meta.splits['train'].num_examples} examples" in said
    assert "data.length leaves out longer ones: 50 % have up to" in said
    assert f"the longest {longest}" in said
    assert "--config.data.packing=documents --config.preference=dpo" in said
    # Merges of "yy" or "nn" were learned.
    assert opened.tokens[:].max() > 256


def rows_of(length, *changes):
    settings = {"data.source": "tokens", "data.path": "out", "preference": "simpo"}
    settings |= {"data.packing": "documents", "data.length": length}
    config = load_config(settings | {"model.max_length": length}, *changes)
    return source.open_rows(config, "train")


def test_rows_hold_whole_examples_and_lose_none():
    """Compares rows with the records, read back by segments."""
    opened = write(PAIRS, examples="pairs")
    rows = rows_of(32)
    batch = rows.read(np.arange(len(rows)))
    assert len(rows) > 1 and batch["examples"].shape[1] > 1
    found = []
    for row, examples in enumerate(batch["examples"]):
        for example in examples[examples[:, 0] > 0]:
            pair = []
            for segment in example:
                here = batch["segment_ids"][row] == segment
                has_loss = here & (batch["weights"][row] > 0)
                ids = batch["tokens"][row, here].tolist()
                assert batch["positions"][row, here].tolist() == [*range(len(ids))]
                completion = bytes(batch["targets"][row, has_loss][:-1].tolist())
                assert batch["targets"][row, has_loss][-1] == 256
                pair += [bytes(ids[: -len(completion) - 1]).decode(), completion]
            found.append(pair)
    expected = [
        [x["prompt"], x["chosen"].encode(), x["prompt"], x["rejected"].encode()]
        for x in PAIRS
    ]
    assert sorted(found) == sorted(expected)
    # Padding: neither an example, nor a loss.
    assert not batch["weights"][batch["segment_ids"] == 0].any()
    assert rows.digest() == ExampleRows(opened, 32).digest()


def test_lists_of_several_lengths_share_rows():
    """Fails if a short list takes in the first completion of the next one."""
    lists = ["bcd", "ef", "ghij", "kl", "mn"]
    write(
        [{"prompt": "a", "completions": [*names]} for names in lists], examples="ranked"
    )
    rows = rows_of(40, {"preference": "reward_model"})
    batch = rows.read(np.arange(len(rows)))
    found = []
    for row, examples in enumerate(batch["examples"]):
        for example in examples[examples[:, 0] > 0]:
            places = [batch["segment_ids"][row] == x for x in example[example > 0]]
            ids = [int(batch["tokens"][row, place][1]) for place in places]
            found.append(bytes(ids).decode())
    assert sorted(found) == lists


def test_sums_of_a_reference_stand_beside_the_completion():
    opened = write(PAIRS, examples="pairs")
    rows = rows_of(32)
    sums = -np.arange(1.0, len(opened.offsets))
    read = ReferencedRows(rows, sums, "0" * 16).read(np.arange(len(rows)))
    documents = rows.documents(np.arange(len(rows)))
    is_real = read["examples"] > 0
    np.testing.assert_array_equal(documents >= 0, is_real)
    np.testing.assert_array_equal(
        read["reference_logprobs"][is_real], sums[documents[is_real]]
    )
    assert not read["reference_logprobs"][~is_real].any()


def test_examples_longer_than_a_row_are_left_out_and_counted(caplog):
    write(PAIRS, examples="pairs")
    rows = rows_of(12)
    assert rows.num_left_out == sum(
        2 * len(x["prompt"]) + len(x["chosen"]) + len(x["rejected"]) + 2 > 12
        for x in PAIRS
    )
    assert f"leaves out {rows.num_left_out} of 23 examples" in caplog.text
    with data_error(
        "data.length=4 has no room for the completions of an example of out/train.bin; "
        "use up to 15, which the longest needs"
    ):
        rows_of(4)


def test_examples_and_objectives_that_do_not_fit_are_refused():
    write(PAIRS, examples="pairs")
    with data_error(
        "data.path='out' holds pairs, which preference='none' does not read; choose a "
        "preference, which compares completions"
    ):
        rows_of(32, {"preference": None})
    with data_error(
        "data.path='out' holds pairs, which preference='kto' does not read; prepare it "
        "with --examples=labels"
    ):
        rows_of(32, {"preference": "kto"})


@pytest.mark.parametrize("suffix", ["bin", "answers", "examples", "labels"])
def test_a_changed_byte_is_found(suffix, tmp_path):
    records = [{"prompt": x, "completion": x, "label": True} for x in "bcd"]
    write(records, examples="labels")
    path = tmp_path / "out" / f"train.{suffix}"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged between bytes 0 and"):
        rows = rows_of(32, {"preference": "kto"})
        rows.read(np.arange(len(rows)))


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    write(PAIRS, examples="pairs")
    for suffix in ("examples", "examples.sums"):
        other = tmp_path / "out" / f"train.idx{suffix.removeprefix('examples')}"
        (tmp_path / "out" / f"train.{suffix}").write_bytes(other.read_bytes())
    with pytest.raises(DataError, match=r"but meta\.json says"):
        store.open_store("out", "train")
