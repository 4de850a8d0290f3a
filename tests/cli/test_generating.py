"""Texts of `zjax generate`: prompts, flags, and files that are gone on with."""

import dataclasses
import gc
import json
import re

import jax
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support import small_llama, small_run
from tests.support.allocated import bytes_here, weights_and_caches
from tests.support.command_line import typed
from tests.support.refusals import config_error
from zjax import rl
from zjax.cli import commands, generating, prompt_file
from zjax.cli.prompt_file import chats_given, read_prompts, rows_given, texts_given
from zjax.cli.text_file import TextFile
from zjax.data.prompts import as_talk
from zjax.files import MAX_TEXT_BYTES
from zjax.generation import cutting
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling
from zjax.settings.schema import Config
from zjax.weights import saved

PROMPTS = ["5 6 7", "8", "9 10", "11 12 13 14", "15"]
DRAWN = ("--temperature=2", "--max_new_tokens=4", "--seed=3")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has no prompt on line 1; write one, or remove it"),
        (b"a\n \nb\n", "has no prompt on line 2; write one, or remove it"),
        (
            b"\xff",
            "cannot be read (it is not UTF-8 text); give a text with a prompt a line",
        ),
        (
            b"a" * (MAX_TEXT_BYTES + 1),
            "cannot be read (it has more than 1,048,576 bytes); "
            "give a text with a prompt a line",
        ),
    ],
    ids=["empty", "blank-line", "bytes", "large"],
)
def test_prompts_are_the_lines_of_a_file(content, problem, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(" def f(\nimport\n")
    assert read_prompts(str(path)) == [" def f(", "import"]
    # Other characters that end a line for `str.splitlines`, as a page of a text does.
    path.write_bytes("a\u2028b\r\nc\x0c\x85d".encode())
    assert read_prompts(str(path)) == ["a\u2028b", "c\x0c\x85d"]
    path.write_bytes(content)
    with config_error(f"--file='{path}' {problem}"):
        read_prompts(str(path))


def test_chats_are_messages_of_a_user_or_records_of_a_file(tmp_path):
    """Fails if a prompt of --chat is continued as text, or a record loses its turns."""
    [talk] = chats_given(typed("generate", "--chat", "--prompt=Why?"))
    assert talk.messages == [{"role": "user", "content": "Why?"}]
    assert generating.describe_text(talk, "So.", as_json=False) == "So."
    turns = [{"role": role, "content": "x"} for role in ("system", "user")]
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    given = typed("generate", "--chat=checkpoint", f"--file={path}")
    [talk] = chats_given(given)
    line = generating.describe_text(talk, "So.", as_json=True)
    answer = {"role": "assistant", "content": "So."}
    assert json.loads(line) == {"messages": [*turns, answer]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--chat",),
            "--chat='true' has no message; write it as --prompt, or several in a "
            "--file",
        ),
        (
            ("--chat", "--prompt=a", "--special_tokens"),
            "--special_tokens=True has no effect with --chat, whose template has them; "
            "leave it out",
        ),
    ],
    ids=["no-message", "special-tokens"],
)
def test_flags_that_conversations_do_not_read_are_refused(words, message):
    with config_error(message):
        chats_given(typed("generate", *words))


def test_the_checkpoint_that_chat_names_ends_texts_too(opened, monkeypatch):
    """Fails if its template makes the prompt, and its end ids are not read."""
    seen = []
    config = small_run.make_config("runs/none")
    monkeypatch.setattr(commands, "make_prompts", lambda *given: given)
    monkeypatch.setattr(commands, "Generator", lambda *_, **__: opened[0])
    monkeypatch.setattr(commands, "chosen_step", lambda *_: 8)
    monkeypatch.setattr(commands, "open_run", lambda *x: (seen.append(x), "raw"))
    chat = generating.chat_folder(typed("generate", "--chat=checkpoint"))
    commands.open_generator(typed("generate"), config, chat)
    assert seen[0][3] == (config.data, 61, "checkpoint")
    assert generating.chat_folder(typed("generate", "--chat")) == ""


def test_weights_of_a_run_are_read_without_moments_and_held_once(tmp_path, monkeypatch):
    """Fails if a command reads what training needs, or holds all weights twice."""
    layers = "model.num_layers=4", "model.tied_head=False", "model.vocab_size=61"
    ends = "checkpoint.every_steps=4", "optimizer.ema_decay=0.9", "zero.stage=3"
    trainer = small_run.fit(tmp_path / "run", *ends, *layers)
    wanted = [trainer.generate("5 6", temperature=0.0, part=p) for p in ("ema", "raw")]
    config = trainer.config
    del trainer
    gc.collect()
    names, peak, before = set(), [], bytes_here(jax.live_arrays())
    restore, cut_block = saved.SavedArrays.restore, cutting._cut_block

    def seen(self, given, *more):
        names.update(given)
        return restore(self, given, *more)

    def cut(*given):
        block = cut_block(*given)
        peak.append(bytes_here(jax.live_arrays()) - before)
        return block

    cut.lower = cut_block.lower
    monkeypatch.setattr(saved.SavedArrays, "restore", seen)
    monkeypatch.setattr(cutting, "_cut_block", cut)
    for part, text in zip(("auto", "raw"), wanted, strict=True):
        words = f"--run={tmp_path / 'run'}", f"--part={part}", "--max_rows=1"
        generator, weights = commands.open_generator(typed("generate", *words), config)
        with generator:
            whole = weights_and_caches(generator)[0]
            written = generator.generate(["5 6"])[0].text
        assert "5 6" + written == text
        assert weights.name.startswith("ema" if part == "auto" else "raw")
        # One block is there twice, of four.
        assert max(peak) < 1.3 * whole
        assert {name.split("/")[0] for name in names} <= {"master", "ema"}
        del generator
        gc.collect()
        peak.clear()


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A generator of a run, which all tests share."""
    folder = tmp_path_factory.mktemp("small") / "run"
    small_run.fit(folder, "checkpoint.every_steps=4")
    given = typed("generate", f"--run={folder}", "--max_rows=2")
    config = commands.generating_settings(given)
    generator, weights = commands.open_generator(given, config)
    with generator:
        yield generator, weights


@pytest.fixture
def write(opened, tmp_path, monkeypatch):
    """Function that runs the command on the prompts, and returns the output file."""
    monkeypatch.setattr(commands, "generating_settings", lambda _: Config())
    monkeypatch.setattr(commands, "open_generator", lambda *_: opened)
    monkeypatch.setattr(opened[0], "close", lambda: None)
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    output = tmp_path / "out.jsonl"

    def write(*words):
        common = f"--file={path}", f"--output={output}", *DRAWN
        generating.generate(typed("generate", *common, *words))
        return output

    return write


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_hold_the_texts_in_the_order_of_the_file(write, opened):
    """Fails if a line has another prompt, sample or text than a generator writes."""
    more = "--num_samples=2", "--num_logprobs=1", "--repetition_penalty=1.5"
    rows = read(write(*more))
    sampling = Sampling(
        max_new_tokens=4,
        temperature=2.0,
        top_k=40,
        seed=3,
        num_samples=2,
        num_logprobs=1,
        repetition_penalty=1.5,
    )
    wanted = opened[0].generate(PROMPTS, sampling)
    assert [row["prompt"] for row in rows] == [x for x in PROMPTS for _ in range(2)]
    assert [row["sample"] for row in rows] == [0, 1] * len(PROMPTS)
    assert [row["text"] for row in rows] == [text.text for text in wanted]
    assert [row["ids"] for row in rows] == [text.ids for text in wanted]
    assert len({str(row["ids"]) for row in rows}) > len(PROMPTS)
    assert {row["finish_reason"] for row in rows} <= {"length", "stop"}
    for row, text in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(row["logprobs"], text.logprobs, atol=1e-4)
        assert [len(best) for best in row["best"]] == [1] * len(row["ids"])


def test_lines_hold_the_scores_of_prompts(write, opened):
    """Fails if a flag asks for scores in vain, or a text is written beside."""
    rows = read(write("--prompt_logprobs=2", "--max_new_tokens=0"))
    sampling = Sampling(prompt_logprobs=2, temperature=2.0)
    wanted = opened[0].generate(PROMPTS, sampling)
    for row, text in zip(rows, wanted, strict=True):
        assert (row["text"], row["ids"], row["finish_reason"]) == ("", [], "length")
        assert row["prompt_ids"] == text.prompt_ids
        scores, best = row["prompt_logprobs"], row["prompt_best"]
        assert (scores[0], best[0]) == (None, None)
        np.testing.assert_allclose(scores[1:], text.prompt_logprobs[1:], atol=1e-4)
        assert [len(x) for x in best[1:]] == [2] * (len(scores) - 1)
    assert len(rows) == len(PROMPTS)


@pytest.mark.parametrize("num_lines", [0, 1, 4, 5, 10])
def test_a_file_that_was_cut_is_gone_on_with(write, opened, monkeypatch, num_lines):
    """Fails if lines are lost, repeated or torn, or if done prompts are written."""
    output = write("--num_samples=2")
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    torn = b"".join(lines[:num_lines]) + b"".join(lines[num_lines:])[:9]
    output.write_bytes(torn)
    asked, generate_each = [], opened[0].generate_each

    def counted(prompts, *given, **named):
        asked.extend(prompts)
        return generate_each([*asked], *given, **named)

    monkeypatch.setattr(opened[0], "generate_each", counted)
    assert write("--num_samples=2").read_bytes() == whole
    assert asked == PROMPTS[num_lines // 2 :]


def test_a_file_of_other_texts_is_refused(write, tmp_path):
    """Fails if texts of other prompts or settings are mixed, or a file is lost."""
    output = write()
    whole = output.read_bytes()
    held = f"--output='{output}' holds texts of"
    with config_error(
        f"{held} temperature=2.0, not 1.0; name another file\n"
        f"{held} stop=[], not ['1']; name another file"
    ):
        write("--temperature=1", "--stop=1")
    with pytest.raises(ValueError, match="holds texts of prompts='"):
        (tmp_path / "other.txt").write_text("5\n")
        write(f"--file={tmp_path / 'other.txt'}")
    (tmp_path / "out.jsonl.origin.json").unlink()
    with config_error(
        f"--output='{output}' holds texts, and out.jsonl.origin.json does not say of "
        "which prompts; name another file"
    ):
        write()
    assert output.read_bytes() == whole


def test_a_directory_is_no_file_of_texts(tmp_path):
    """Fails if a file is left beside the directory, or another setting is named."""
    path = tmp_path / "adir"
    path.mkdir()
    with config_error(f"--output='{path}' is a directory; name another file"):
        TextFile(path, {})
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_another_command_writes_is_refused(tmp_path):
    """Fails if lines of two commands are mixed."""
    path = tmp_path / "out.jsonl"
    with TextFile(path, {}) as first:
        first.write(b"a\n")
        with config_error(
            f"--output='{path}' is written by another command; wait until it ends, or "
            "name another file"
        ):
            TextFile(path, {})
        first.write(b"b\n")
    with TextFile(path, {}) as again:
        assert again.num_prompts == 2


def test_texts_up_to_another_length_are_other_texts(write):
    """Fails if a file has texts that end at two lengths, for the same prompts."""
    output = write("--max_new_tokens=0", "--max_length=9")
    held = f"--output='{output}' holds texts of"
    with config_error(f"{held} max_length=9, not 0; name another file"):
        write("--max_new_tokens=0")
    output.unlink()
    whole = write("--max_length=9").read_bytes()
    assert write().read_bytes() == whole  # four tokens at any length


def test_a_prompt_that_cannot_be_served_is_named_before_a_text_is_written(
    write, tmp_path
):
    path = tmp_path / "long.txt"
    path.write_text(f"5\n{'6 ' * 99}\n{'7 ' * 99}\n")
    with config_error(
        "--top_k=62 is not between 0 and model.vocab_size=61; use 0 for all\n"
        "prompt='6 6 6 6 6 6 6 6 6 6 ' has 99 tokens, and prompt and text together "
        "have at most 16; shorten it\n"
        "prompt='7 7 7 7 7 7 7 7 7 7 ' has 99 tokens, and prompt and text together "
        "have at most 16; shorten it"
    ):
        write(f"--file={path}", "--top_k=62")
    assert not (tmp_path / "out.jsonl").exists()


def test_sampling_out_of_range_is_refused_by_flag():
    words = "--temperature=-1", "--top_p=0", "--min_p=2", "--num_samples=0"
    with config_error(
        "--num_samples=0 is below 1; use 1\n"
        "--temperature=-1.0 is neither 0 nor 1e-05 or more; use 0 for the most likely "
        "token, or 1 for the model's distribution\n"
        "--top_p=0.0 is not above 0 and up to 1; use 1 for all\n"
        "--min_p=2.0 is not between 0 and 1; use 0 for all"
    ):
        generating.read_sampling(typed("generate", *words))
    with config_error("--num_logprobs=1 has no effect without --output; leave it out"):
        generating.read_sampling(typed("generate", "--num_logprobs=1"))
    told = "--prompt_logprobs=0 has no effect without --output; leave it out"
    with config_error(told):
        generating.read_sampling(typed("generate", "--prompt_logprobs=0"))


def test_all_flags_of_sampling_are_read():
    words = {
        "max_new_tokens": 9,
        "min_new_tokens": 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.125,
        "frequency_penalty": -0.5,
        "num_samples": 2,
        "num_logprobs": 4,
        "prompt_logprobs": 2,
        "seed": 6,
    }
    given = (f"--{name}={value}" for name, value in words.items())
    stop = "--stop=, and", "--stop=b", "--output=x"
    sampling = generating.read_sampling(typed("generate", *given, *stop))
    assert sampling == Sampling(**words, stop=(", and", "b"))


def test_texts_are_a_field_of_records(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\\nb", "question": "c"}\n')
    given = f"--file={path}"
    assert [*texts_given(typed("generate", given))] == ["a\nb"]
    assert [*texts_given(typed("generate", given, "--text_field=question"))] == ["c"]
    path.write_text('{"prompt": [1, 2]}\n')
    with config_error(
        f"--file='{path}' has token ids in 'prompt'; choose another --text_field"
    ):
        texts_given(typed("generate", given))


@pytest.mark.parametrize("words", [(), ("--chat",)], ids=["texts", "chats"])
def test_records_are_read_as_they_are_needed(words, tmp_path, monkeypatch):
    """Fails if all prompts of a file are held in memory, or a record is found wrong
    after the weights were read.
    """
    path, num_read = tmp_path / "prompts.jsonl", []
    turns = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    path.write_text(3 * (json.dumps(turns) + "\n"))
    for name in ("read_documents", "read_conversations"):
        read = getattr(prompt_file, name)

        def counted(*given, read=read):
            for document in read(*given):
                num_read.append(document)
                yield document

        monkeypatch.setattr(prompt_file, name, counted)
    given = typed("generate", *words, f"--file={path}")
    prompts = chats_given(given) if words else texts_given(given)
    assert len(prompts) == len(num_read) == 3
    next(iter(prompts))
    assert len(num_read) == 4
    assert len([*prompts]) == len([*prompts]) == 3


def test_a_checkpoint_of_hugging_face_answers_without_a_run(tmp_path, monkeypatch):
    """Fails if other weights, another template, or another order make the answers."""
    monkeypatch.chdir(tmp_path)
    folder = small_llama.write(tmp_path / "llama", max_length=64)
    talks = [[{"role": "user", "content": text}] for text in ("Why?", "So?", "a")]
    lines = [json.dumps({"messages": talk}) for talk in talks]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")
    files = "--file=talks.jsonl", "--output=new/answers.jsonl"
    greedy = "--temperature=0", "--max_new_tokens=5", "--max_rows=2"
    words = f"--model={folder}", "--chat", *files, *greedy
    generating.generate(typed("generate", *words))
    rows = read(tmp_path / "new" / "answers.jsonl")
    with Generator(folder, max_rows=2) as generator:
        wanted = generator.generate(
            [as_talk(talk) for talk in talks], Sampling(max_new_tokens=5)
        )
    assert [row["messages"] for row in rows] == talks
    assert [row["ids"] for row in rows] == [text.ids for text in wanted]
    assert [row["text"] for row in rows] == [text.text for text in wanted]
    assert "logprobs" not in rows[0]


def test_drafts_are_told_and_change_no_text(tmp_path, capsys):
    """Fails if the flag has no effect, or nobody learns what became of the drafts."""
    folder = small_llama.write(tmp_path / "llama", max_length=256)
    words = f"--model={folder}", "--prompt=abcabcabc", "--temperature=0"
    words += "--max_new_tokens=200", "--max_rows=1"
    generating.generate(typed("generate", *words))
    wanted = capsys.readouterr()
    generating.generate(typed("generate", *words, "--num_drafts=4"))
    found = capsys.readouterr()
    assert found.out == wanted.out and "drafts" not in wanted.err
    told, counted = [x for x in found.err.splitlines() if x.startswith("drafts")]
    assert told == (
        "drafts: a pass reads up to 4 more tokens of each text, copied from the text "
        "or from others of the prompt, while texts repeat; the texts are those without "
        "drafts, but for rounding"
    )
    numbers = re.fullmatch(r"drafts: (\d+) of (\d+) accepted", counted)
    accepted, read = map(int, numbers.groups())
    assert 0 < accepted <= read


SUMS = [
    {"prompt": f"{x} {y}", "answer": x + y, "tags": ["a", None]}
    for x, y in ((5, 6), (8, 9), (1, 2))
]


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in SUMS))
    return path


def test_training_reads_rollouts(write, opened, records):
    """Fails if a field is lost, or if log-probabilities are of another distribution."""
    words = "--rollouts", "--num_samples=2", f"--file={records}"
    rollouts = rl.read_rollouts(write(*words))
    assert [(x.prompt, x.sample) for x in rollouts] == [
        (n, sample) for n in range(3) for sample in range(2)
    ]
    sampling = Sampling(4, 2.0, seed=3, num_samples=2, num_logprobs=0)
    drawn = dataclasses.replace(sampling, filtered_logprobs=True)
    wanted = opened[0].generate([x["prompt"] for x in SUMS], drawn)
    raw = opened[0].generate([x["prompt"] for x in SUMS], sampling)
    for rollout, text in zip(rollouts, wanted, strict=True):
        record = SUMS[rollout.prompt]
        assert (rollout.given, rollout.text) == (record["prompt"], text.text)
        assert rollout.row == {"answer": record["answer"], "tags": ["a", None]}
        assert rollout.ids.tolist() == text.ids
        ids = [int(x) for x in record["prompt"].split()]
        assert rollout.prompt_ids.tolist() == text.prompt_ids == ids
        np.testing.assert_allclose(rollout.logprobs, text.logprobs, atol=1e-5)
        assert (rollout.step, rollout.temperature) == (8, 2.0)
        assert rollout.sampling["top_k"] == 0 and rollout.rewards == {}
    assert np.abs(rollouts[0].logprobs - raw[0].logprobs).max() > 0.1


@pytest.mark.parametrize("num_lines", [0, 3, 4])
def test_a_file_of_rollouts_is_gone_on_with(write, records, num_lines):
    """Fails if the checksum of all lines begins anew, or a prompt gets another row."""
    words = "--rollouts", "--num_samples=2", f"--file={records}"
    output = write(*words)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:num_lines]) + lines[num_lines][:50])
    assert write(*words).read_bytes() == whole
    with config_error(
        f"--output='{output}' holds texts of top_k=0, not 40; name another file\n"
        f"--output='{output}' holds texts of num_logprobs=0, not None; name another "
        f"file\n--output='{output}' holds texts of filtered_logprobs=True, not False; "
        "name another file"
    ):
        write("--num_samples=2", f"--file={records}")


def test_rollouts_of_a_text_file_have_no_further_fields(write):
    rollouts = rl.read_rollouts(write("--rollouts"))
    assert [x.given for x in rollouts] == PROMPTS
    assert [x.row for x in rollouts] == [{}] * len(PROMPTS)


FILTERED = "draws from a filtered distribution, which training does not"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--output=a", "--top_k=40", "--min_p=.1", "--repetition_penalty=1.1"),
            f"--top_k=40 {FILTERED}; use 0\n--min_p=0.1 {FILTERED}; use 0.0\n"
            f"--repetition_penalty=1.1 {FILTERED}; use 1.0",
        ),
        (
            ("--output=a", "--temperature=0"),
            "--temperature=0.0 draws nothing, so that tokens have no probability to "
            "learn from; use 1.0",
        ),
        ((), "--rollouts=True writes no file; name a file by --output"),
        (
            ("--output=a", "--num_logprobs=2", "--prompt_logprobs=0"),
            "--num_logprobs=2 has no effect with --rollouts, whose lines have all that "
            "training reads; leave it out\n"
            "--prompt_logprobs=0 has no effect with --rollouts, whose lines have all "
            "that training reads; leave it out",
        ),
    ],
    ids=["filters", "greedy", "printed", "more"],
)
def test_rollouts_that_training_cannot_read_are_refused(words, message):
    with config_error(message):
        generating.read_sampling(typed("generate", "--rollouts", *words))


TURNS = [{"role": "user", "content": "Why?"}]


def test_prompts_of_rollouts_keep_all_other_fields(tmp_path):
    path = tmp_path / "rows.jsonl"
    tools = [{"type": "function"}]
    records = [
        {"prompt": "Why?", "answer": 4},
        {"prompt": TURNS, "tools": tools},
        {"messages": TURNS, "answer": {"a": [1]}},
    ]
    path.write_text("".join(json.dumps(x) + "\n" for x in records))
    pairs = [*rows_given(typed("generate", "--chat", f"--file={path}"))]
    assert [x.messages for x, _ in pairs] == [TURNS] * 3
    assert [x.tools for x, _ in pairs] == [None, tools, None]
    rows = [{"answer": 4}, {"tools": tools}, {"answer": {"a": [1]}}]
    assert [row for _, row in pairs] == rows
    file = rows_given(typed("generate", "--text_field=text", f"--file={tables(path)}"))
    assert [*file] == [("a", {"n": 1}), ("b", {"n": None})]
    assert [*rows_given(typed("generate", "--prompt=a"))] == [("a", {})]


def tables(path):
    """A table beside a file."""
    path = path.with_suffix(".parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "n": [1, None]}), path)
    return path


@pytest.mark.parametrize(
    ("record", "words", "problem"),
    [
        (
            {"prompt": TURNS},
            (),
            "has no text as 'prompt' in line 1; choose another --text_field",
        ),
        (
            {"text": "a"},
            ("--chat",),
            "has no text or messages as 'messages' in line 1; choose another "
            "--text_field",
        ),
        (
            {"prompt": "a", "completion": "b"},
            (),
            "has the field 'completion', an argument of rewards in line 1; name the "
            "field otherwise, or make it JSON",
        ),
        (
            {"prompt": "a", "answer": float("nan")},
            (),
            "has a number that is not finite in line 1; name the field otherwise, or "
            "make it JSON",
        ),
    ],
    ids=["messages", "no-prompt", "argument", "nan"],
)
def test_records_that_make_no_rollout_are_refused(record, words, problem, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record))
    with config_error(f"--file='{path}' {problem}"):
        rows_given(typed("generate", "--rollouts", f"--file={path}", *words))


def test_dtypes_reach_the_generator_and_name_the_weights(tmp_path, monkeypatch):
    """Fails if texts of other codes are gone on with as if they were the same."""
    seen = []

    def make(*_, **given):
        seen.append(given)
        return object.__new__(Generator)

    monkeypatch.setattr(commands, "Generator", make)
    plain, config = (f"--model={tmp_path}", "--max_rows=3"), small_run.make_config("a")
    weights = commands.open_generator(typed("generate", *plain), config)[1]
    assert weights == (str(tmp_path), 0)
    for command in ("generate", "serve"):
        words = *plain, "--weight_dtype=int4", "--cache_dtype=float8"
        name = commands.open_generator(typed(command, *words), config)[1].name
        assert name == f"{tmp_path}, weight_dtype=int4, cache_dtype=float8"
        dtypes = {"weight_dtype": "int4", "cache_dtype": "float8"}
        numbers = {"max_rows": 3, "max_length": 0, "num_drafts": 0}
        assert seen[-1] == numbers | dtypes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--model=a", "--run=b", "--step=3"),
            "--run='b' has no effect with --model; leave it out\n"
            "--step='3' has no effect with --model; leave it out",
        ),
        (
            ("--model=a", "--chat=b", "--prompt=c"),
            "--chat='b' has no effect with --model, which has a chat template; use "
            "--chat without a directory",
        ),
    ],
    ids=["run", "chat"],
)
def test_flags_that_a_model_does_not_read_are_refused(words, message):
    with config_error(message):
        generating.generate(typed("generate", *words))
