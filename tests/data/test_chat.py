"""Conversations: the template's text, a loss on answers alone, packed without leaks."""

import ast
import itertools
import json
import shutil

import jax
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support import small_run
from tests.support.command_line import typed
from tests.support.refusals import config_error, data_error, listed
from zjax.checkpoint.export import export_huggingface
from zjax.checkpoint.tokenizer import tokenizer_of_run
from zjax.cli import data_commands, main
from zjax.config.load import load_config
from zjax.data import (
    chat,
    conversations,
    packing,
    prepare,
    prompts,
    source,
    store,
    template_process,
)
from zjax.data.tokenizer import train_bpe
from zjax.errors import DataError
from zjax.run.trainer import Trainer
from zjax.run.writer import Writer

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
AS_TALK = [
    {"role": "user", "content": "Say yes"},
    {"role": "assistant", "content": "yes"},
]


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
    expected = {
        as_text(talk): [f"{m['content']}</s>" for m in talk if m["role"] == "assistant"]
        for talk in (*TALKS, AS_TALK)
    }
    assert dict(zip(talks, answers, strict=True)) == expected


def test_parquet_has_the_same_tokens(checkpoint, prepared, tmp_path):
    """Fails if columns of structs are read otherwise than lines."""
    table = pyarrow.table({"messages": [*TALKS, AS_TALK]})
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
        *("num_steps=2", "global_batch_size=2"),
    )
    trainer = small_run.make_trainer(tmp_path, *settings, num_devices=1)
    batch = next(iter(trainer.loader))
    assert float(jax.numpy.sum(batch["weights"])) <= 2 * weight.max()
    trainer.fit()
    trainer.close()
    kept = tokenizer_of_run(trainer.store)
    assert kept.record == store.read_meta(str(prepared)).tokenizer
    assert kept.path.read_bytes() == (prepared / "tokenizer.json").read_bytes()
    export_huggingface(trainer.store, str(tmp_path / "out"))
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["eos_token_id"] == kept.record.end_ids[0]
    assert chat.load_chat(str(tmp_path / "out")).templates  # of the data


@pytest.fixture
def encode(checkpoint, tmp_path):
    """Encodes records with a template; gives what a loss is on in brackets."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def run(template, *records, suffix=".jsonl", **more):
        folder = tmp_path / "template"
        folder.mkdir(exist_ok=True)
        for file in checkpoint.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "chat_template.jinja").write_text(template)
        if suffix == ".jsonl":
            (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
        else:
            table = pyarrow.Table.from_pylist(list(records))
            parquet.write_table(table, tmp_path / "in.parquet")
        inputs, output = [tmp_path / f"in{suffix}"], tmp_path / "tokens"
        options = {"chat": str(folder), "validation_fraction": 0.0} | more
        prepare.prepare(inputs, output, **options)
        opened = store.open_store(str(output), "train")
        answers = opened.answers
        assert answers is not None
        return [
            bracketed(library, opened.tokens[i:j], answers[i:j])
            for i, j in itertools.pairwise(opened.offsets.tolist())
        ]

    return run


def bracketed(library, ids, answers):
    edges = [0, *(np.flatnonzero(np.diff(answers)) + 1), len(ids)]
    runs = (
        (library.decode(ids[i:j], skip_special_tokens=False), answers[i])
        for i, j in itertools.pairwise(edges)
    )
    return "".join(f"[{text}]" if is_answer else text for text, is_answer in runs)


THINKING = """
{%- if tools %}tools {{ tools | tojson }}
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.last = loop.index %}
{%- endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == "assistant" %}
    {%- set parts = (m.content or "").split("</think>") %}
    {%- set thought = parts[0].replace("<think>", "").strip() if parts[1:] else "" %}
    {{- "<s>assistant\n" }}
    {%- if loop.index > ns.last and (loop.last or thought) %}
        {{- "<think>" + thought + "</think>" }}
    {%- endif %}
    {{- parts[-1] }}
    {%- for call in m.tool_calls or [] %}call {{ call | tojson }}{% endfor %}
    {{- "</s>\n" }}
{%- else %}{{ "<s>" + m.role + "\n" + m.content + "</s>\n" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<s>assistant\n" }}
{%- if quick %}{{ "<think></think>" }}{% endif %}{% endif %}"""
"""Thoughts are of the last turn alone, as in Qwen3."""
CUTTING = """
{%- for m in messages %}
{%- if m.role == "assistant" %}{{ "<A>" + m.content.split("</think>")[-1] + "</s>" }}
{%- else %}{{ "<U>" + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<A><think>\n" }}{% endif %}"""
"""Thoughts are cut from all turns, and the prompt begins one, as in DeepSeek-R1."""
PLAIN = """
{%- for m in messages %}{{ "<s>" + m.role + "\n" + m.content }}
{%- if m.name is defined %}{{ " by " ~ m.name }}{% endif %}
{%- if m.weight is defined %}{{ " weighs" }}{% endif %}{{ "</s>\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<s>assistant\n" }}{% endif %}"""


def user(content, **more):
    return {"role": "user", "content": content, **more}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def test_earlier_turns_that_are_rewritten_give_a_sample_per_answer(encode):
    """Fails if an answer is trained on as it is repeated, not as it is generated."""
    talk = [user("a"), answer("<think>m</think>b"), user("c"), answer("d")]
    assert encode(THINKING, {"messages": talk}) == [
        "<s>user\na</s>\n<s>assistant\n[<think>m</think>b</s>\n]",
        "<s>user\na</s>\n<s>assistant\nb</s>\n<s>user\nc</s>\n<s>assistant\n"
        "[<think></think>d</s>\n]",
    ]


def test_turns_that_a_template_keeps_share_a_sample(encode):
    """Fails if tools are dropped, or all answers of a template that rewrites split."""
    call, tools = {"name": "f", "arguments": {"x": 1}}, [{"name": "f"}]
    thought = "<think>m</think>"
    talk = [user("a"), answer(thought, tool_calls=[call])]
    talk += [{"role": "tool", "content": "5"}, answer("d")]
    assert encode(THINKING, {"messages": talk, "tools": tools}) == [
        'tools [{"name": "f"}]\n<s>user\na</s>\n<s>assistant\n'
        f"[{thought}call {json.dumps(call)}</s>\n]<s>tool\n5</s>\n<s>assistant\n"
        "[<think></think>d</s>\n]"
    ]


def test_variables_of_a_record_reach_the_template(encode):
    """Fails if they are dropped: then the loss is on an empty thought."""
    options = {"chat_template_kwargs": {"quick": True}}
    record = {"messages": [user("a"), answer("b")]} | options
    expected = ["<s>user\na</s>\n<s>assistant\n<think></think>[b</s>\n]"]
    assert encode(THINKING, record) == expected


def test_prompt_that_begins_the_answer_keeps_what_the_template_cuts(encode):
    """Fails if thoughts are lost, or the loss is on what the prompt has."""
    talk = [user("a"), answer("<think>\nm</think>b"), user("c")]
    talk.append(answer("<think>\nn</think>d"))
    assert encode(CUTTING, {"messages": talk}) == [
        "<U>a<A><think>\n[m</think>b</s>]",
        "<U>a<A>b</s><U>c<A><think>\n[n</think>d</s>]",
    ]


def test_marks_of_a_template_are_what_has_a_loss(encode):
    """Fails if the tag around answers is not obeyed where a prompt begins them."""
    body = 'm.content.split("</think>")[-1] + "</s>" }}'
    marked = CUTTING.replace('{{ "<A>" + ' + body, "<A>{% generation %}{{ " + body)
    marked = marked.replace("\n{%- else %}", "{% endgeneration %}\n{%- else %}")
    talk = [user("a"), answer("b"), user("c"), answer("<think>n</think>d")]
    found = encode(marked, {"messages": talk})
    assert found == ["<U>a<A>[b</s>]<U>c<A>[d</s>]"]


MARKERS = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def marked_checkpoint(checkpoint, tmp_path):
    """A checkpoint whose turns end where the marker of the next role begins."""
    import tokenizers

    path = str(checkpoint / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(path)
    library.add_special_tokens(["<user>", "<assistant>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(MARKERS)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    talk = {"messages": [user("a"), answer("b"), user("c"), answer("d")]}
    (tmp_path / "in.jsonl").write_text(json.dumps(talk))
    return library


def prepare_marked(folder):
    options = {"chat": str(folder), "validation_fraction": 0.0}
    meta = prepare.prepare([folder / "in.jsonl"], folder / "tokens", **options)
    return meta.tokenizer.end_ids, store.open_store(str(folder / "tokens"), "train")


def test_the_marker_at_which_a_checkpoint_stops_is_trained(marked_checkpoint, tmp_path):
    """Fails if a template without ends of turns teaches a model to write on."""
    marker = marked_checkpoint.token_to_id("<user>")
    config = json.dumps({"eos_token_id": [marker]})
    (tmp_path / "generation_config.json").write_text(config)
    _, opened = prepare_marked(tmp_path)
    assert opened.answers is not None
    found = bracketed(marked_checkpoint, opened.tokens[:], opened.answers[:])
    assert found == "<user>a<assistant>[b<user>]c<assistant>[d<user>]"


def test_an_empty_answer_does_not_end_with_its_prompt(marked_checkpoint, tmp_path):
    """Fails if the marker of a role counts as the end of an answer without a text."""
    talk = {"messages": [user("a"), answer(""), user("c"), answer("d")]}
    (tmp_path / "in.jsonl").write_text(json.dumps(talk))
    ends, _ = prepare_marked(tmp_path)
    assert ends == (marked_checkpoint.token_to_id("</s>"),)


def test_answers_without_an_end_are_told(marked_checkpoint, tmp_path, caplog):
    """Fails if a model is trained to write on, and nobody is told."""
    ends, opened = prepare_marked(tmp_path)
    assert opened.answers is not None
    found = bracketed(marked_checkpoint, opened.tokens[:], opened.answers[:])
    assert found == "<user>a<assistant>[b]<user>c<assistant>[d]"
    assert ends == (marked_checkpoint.token_to_id("</s>"),)
    assert caplog.messages == [
        f"the chat template of {tmp_path} ends 2 of 2 answers without a special "
        "token: no end of these answers is trained, and a text generated after them "
        "may not end; write eos_token behind each answer in the template"
    ]


def test_ids_that_end_answers_are_recorded(checkpoint, tmp_path):
    """Fails if generation would not stop where answers ended in training."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = {"eos_token": "<|endoftext|>", "chat_template": PLAIN}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    talk = {"messages": [user("a"), answer("b")]}
    (tmp_path / "in.jsonl").write_text(json.dumps(talk))
    ends, _ = prepare_marked(tmp_path)
    ids = store.open_tokenizer(str(tmp_path / "tokens")).special_tokens
    assert ends == (ids["<|endoftext|>"], ids["</s>"])
    written = (tmp_path / "tokens" / "generation_config.json").read_text()
    assert json.loads(written) == {"eos_token_id": [*ends]}


def test_template_for_tools_is_taken_where_there_are_tools(checkpoint, tmp_path):
    """Fails if a checkpoint's second template is not used, or always."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    sources = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    pairs = [{"name": name, "template": text} for name, text in sources.items()]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": pairs})
    )
    render = chat.load_chat(str(tmp_path)).render
    record = {"messages": [user("a"), answer("b")]}
    talks = [
        conversations.read_conversation(record | more, "in.jsonl", "line 1")
        for more in ({}, {"tools": [{"name": "f"}]})
    ]
    assert [render(talk, 1, True) for talk in talks] == ["plain", "1 tools"]


def test_conversations_that_are_refused_can_be_left_out(encode, caplog):
    """Fails if one ends the command, or takes the place of another."""
    good = {"messages": [user("a"), answer("b")]}
    bad = [{"messages": [user("a")]}, {"messages": [user("a"), user("a"), answer("b")]}]
    found = encode(DIVIDING, good, *bad, good, skip_broken=True)
    assert len(found) == 2 and found[0] == found[1]
    assert caplog.messages[-1].startswith("broken records that were left out: 2; ")


def test_template_that_never_ends_stops_at_its_conversation(monkeypatch, tmp_path):
    """Fails if it is waited for, or the conversations after it have no text."""
    monkeypatch.setattr(template_process, "MAX_SECONDS", 1)
    endless = (
        "{% if messages[0].content == 'a' %}{{ 9 ** (9 ** (8 + messages | length)) }}"
    )
    source = {"default": endless + "{% endif %}{{ messages[0].content }}"}
    talks = [
        conversations.read_conversation(
            {"prompt": content, "answer": "x"}, "in.jsonl", "line 1"
        )
        for content in "zab"
    ]
    templates = chat.Templates("folder", source, {})
    found = list(templates.render_each(talks, lambda _: [(1, True)]))
    assert [each.texts for each in found] == [["z"], (), ["b"]]
    assert found[1].error == "it takes more than 1 s"


def test_reasons_of_templates_are_short():
    """Fails if a hostile template fills the memory or the terminal of its user."""
    source = {"default": "{{ raise_exception('x' * 9999) }}"}
    record = {"prompt": "a", "answer": "b"}
    talk = conversations.read_conversation(record, "in.jsonl", "line 1")
    templates = chat.Templates("folder", source, {})
    (found,) = templates.render_each([talk], lambda _: [(1, True)])
    assert found.refusal == "x" * 1000


@pytest.mark.transformers
@pytest.mark.parametrize("template", [THINKING, CUTTING, TEMPLATE, PLAIN])
def test_prompts_are_those_of_transformers(template, encode, tmp_path):
    """Fails if a text, or what an answer follows, is another than transformers has."""
    transformers = pytest.importorskip("transformers")
    talk = [user("a"), answer("<think>\nm</think>b"), user("c")]
    talk.append(answer("<think>\nn</think>d"))
    found = encode(template, {"messages": talk})
    library = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "template" / "tokenizer.json"),
        **{"bos_token": "<s>", "eos_token": "</s>", "chat_template": template},
    )
    prompts = [
        library.apply_chat_template(
            talk[:number], tokenize=False, add_generation_prompt=True
        )
        for number in (1, 3)
    ]
    if len(found) == 1:
        text = library.apply_chat_template(talk, tokenize=False)
        assert found[0].replace("[", "").replace("]", "") == text
    parts = [
        text.rpartition("[")[0].replace("[", "").replace("]", "") for text in found
    ]
    assert parts == prompts[-len(found) :]


def test_weight_0_takes_an_answer_out_of_the_loss(encode):
    """Fails if the weight is dropped, or given to the template."""
    talk = [user("a"), answer("b", weight=0), user("c"), answer("d", weight=1)]
    assert encode(PLAIN, {"messages": talk}) == [
        "<s>user\na</s>\n<s>assistant\nb</s>\n<s>user\nc</s>\n<s>assistant\n[d</s>\n]"
    ]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "completion": "b"},
        {"prompt": [user("a")], "completion": [answer("b")]},
        {"instruction": "a", "input": "", "output": "b"},
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "b"},
            ]
        },
        {"conversations": [user("a"), answer("b")]},
        {"messages": [user([{"type": "text", "text": "a"}]), answer("b")]},
        {"messages": None, "prompt": "a", "answer": "b"},
    ],
)
def test_layouts_of_records(record, encode):
    """Fails if one is refused, or means something else."""
    assert encode(PLAIN, record) == ["<s>user\na</s>\n<s>assistant\n[b</s>\n]"]


def test_system_input_and_earlier_answers_of_a_prompt(encode):
    """Fails if a field is dropped, or answers of a prompt have a loss."""
    talk = [user("a"), answer("b"), user("c")]
    records = [
        {"instruction": "a", "input": "x", "output": "b", "system": "s"},
        {"prompt": talk, "completion": [answer("d")]},
    ]
    head, turn = (
        "<s>system\ns</s>\n<s>user\na\nx</s>\n",
        "<s>user\na</s>\n<s>assistant\n",
    )
    assert encode(PLAIN, *records) == [
        f"{head}<s>assistant\n[b</s>\n]",
        f"{turn}b</s>\n<s>user\nc</s>\n<s>assistant\n[d</s>\n]",
    ]


def test_tables_have_no_keys_that_only_others_have(encode):
    """Fails if the nulls of a table are keys of messages."""
    named = {"messages": [user("a", name="bob"), answer("b")], "tools": [{"a": 1}]}
    plain = {"messages": [user("a"), answer("b")], "tools": [{"b": 1}]}
    tail = "</s>\n<s>assistant\n[b</s>\n]"
    expected = ['{"a": 1}<s>user\na by bob' + tail, '{"b": 1}<s>user\na' + tail]
    template = "{{ tools[0] | tojson(ensure_ascii=False) }}" + PLAIN  # as GLM's
    assert encode(template, named, plain, suffix=".parquet") == expected


def test_fields_that_are_not_read_are_told_once(encode, caplog):
    """Fails if a field is dropped without a word, or told for every record."""
    record = {"messages": [user("a"), answer("b")], "id": 1, "functions": []}
    encode(PLAIN, record, record)
    told = [x.getMessage() for x in caplog.records if "not read" in x.getMessage()]
    assert [text.partition(" ")[2] for text in told] == [
        "has fields that are not read: id, functions"
    ]


def test_keys_that_a_template_does_not_read_are_told_once(encode, caplog, tmp_path):
    """Fails if calls of tools, or thoughts, are dropped without a word."""
    more = {"tool_calls": [{"name": "f"}], "reasoning_content": "m"}
    encode(PLAIN, *[{"messages": [user("a", name="x"), answer("b", **more)]}] * 2)
    told = [x.getMessage() for x in caplog.records if "reads no" in x.getMessage()]
    assert told == [
        f"{tmp_path / 'template'} has a chat template that reads no "
        "reasoning_content, tool_calls"
    ]


def test_rewriting_templates_are_told_with_numbers(encode, caplog):
    """Fails if conversations become more documents without a word."""
    talk = [user("a"), answer("b"), user("c"), answer("d")]
    encode(THINKING, {"messages": talk}, {"messages": talk[:2]})
    assert (
        "the chat template rewrites earlier turns: 2 conversations are 3 documents, "
        "which repeat them before each answer"
    ) in [x.getMessage() for x in caplog.records]


DIVIDING = PLAIN + "{% if messages | length == 3 %}{{ 1 / 0 }}{% endif %}"


PLAIN_REFUSALS = [
    (PLAIN, ast.literal_eval(record), said)
    for record, said in listed("conversations.txt").items()
]
NESTED = f'{{"a": {"[" * 500}1{"]" * 500}}}'


@pytest.mark.parametrize(
    ("template", "record", "expected"),
    [
        *PLAIN_REFUSALS,
        (
            PLAIN,
            {"messages": [user("a"), answer("b")], "chat_template_kwargs": NESTED},
            "has values nested deeper than 100 levels in line 2; leave them out",
        ),
        (
            TEMPLATE,
            {"messages": [{"role": "tool", "content": "x"}, user("a"), answer("b")]},
            "has a conversation that the chat template of FOLDER refuses "
            "(no such role: tool) in line 2; correct it, or leave it out",
        ),
        (
            DIVIDING,
            {"messages": [user("a"), user("a"), answer("b")]},
            "has a conversation on which the chat template of FOLDER fails "
            "(ZeroDivisionError: division by zero) in line 2; correct it, or the "
            "template, or leave it out",
        ),
        (
            PLAIN + "{% if messages[0].name %}{{ 'x' * 3000000000 }}{% endif %}",
            {"messages": [user("a", name="b"), answer("c")]},
            "has a conversation on which the chat template of FOLDER fails (it needs "
            "too much memory) in line 2; correct it, or the template, or leave it out",
        ),
        (
            PLAIN + "{% if messages[0].name %}{{ 'x' * 4500000 }}{% endif %}",
            {"messages": [user("a", name="b"), answer("c")]},
            "has a conversation on which the chat template of FOLDER fails "
            "(its text has more than 4,194,304 characters) in line 2; correct it, or "
            "the template, or leave it out",
        ),
        (
            TEMPLATE,
            {"messages": [user("a"), answer("\ufdd0")]},
            "has U+FDD0 or U+FDD1, which are no characters, in line 2; leave them out",
        ),
        (
            PLAIN + "{% if messages | length == 2 %}{% generation %}x"
            "{% endgeneration %}{% endif %}",
            {"messages": [user("a"), user("b"), answer("c")]},
            "has an answer, message 3, that the chat template of FOLDER does not mark, "
            "in line 2; correct the template, or give it weight 0",
        ),
        (
            CUTTING,
            {"messages": [user("a"), answer("b")]},
            "has an answer, message 2, that does not begin with '<think>\\n' as the "
            "prompt in the chat template of FOLDER does, in line 2; write this into "
            "its content, or give it weight 0",
        ),
    ],
)
def test_unusable_conversation_is_told(template, record, expected, encode, tmp_path):
    """Fails if it is dropped, or not named, or half a directory stays."""
    good = {"messages": [user("a"), answer("<think>\nm</think>b")]}
    with pytest.raises(DataError) as caught:
        encode(template, good, record)
    expected = expected.replace("FOLDER", str(tmp_path / "template"))
    assert str(caught.value) == f"input={str(tmp_path / 'in.jsonl')!r} {expected}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "template"]


def test_rows_without_documents_or_without_any_loss_are_refused(prepared):
    """Fails if blocks train on prompts, or a run takes steps without a loss."""
    with data_error(
        f"data.packing='blocks' takes all tokens of {prepared}/train.bin for answers; "
        "use 'documents'"
    ):
        rows_of(prepared, 16)
    longest = np.diff(np.fromfile(prepared / "train.idx", np.int64)).max()
    with data_error(
        "data.length=2 is over before the first answer of each conversation of "
        f"{prepared}/train.bin; use up to {longest}, the longest of them"
    ):
        rows_of(prepared, 2, packing="documents")


def test_long_conversations_are_cut_and_told(prepared, caplog):
    """Fails if an answer has no prompt in its row, or a row no loss, unsaid."""
    sizes = np.diff(np.fromfile(prepared / "train.idx", np.int64))
    length = int(np.sort(sizes)[1])
    rows = rows_of(prepared, length, packing="documents")
    batch = rows.read(np.arange(len(rows)))
    assert batch["weights"].any(axis=1).all()
    answers = np.fromfile(prepared / "train.answers", np.uint8)
    starts = np.cumsum(sizes) - sizes
    ends = np.minimum(starts + length + 1, starts + sizes)
    within = [answers[i:j].sum() for i, j in zip(starts, ends, strict=True)]
    assert batch["weights"].sum() == sum(within) < answers.sum()
    message = caplog.records[-1].getMessage()
    assert message == (
        f"data.length={length} cuts 1 of 3 conversations of {prepared}/train.bin, the "
        f"longest of {sizes.max()} tokens; {within.count(0)} have no answer before the "
        "cut and are left out"
    )


def test_conversation_without_an_answer_before_the_cut_is_left_out():
    """Fails if its row is trained on without a loss, or another piece of it is kept."""
    answers = np.array([0, 0, 0, 0, 0, 1, 1, 0, 1, 1], np.uint8)
    tokens, offsets = np.arange(10, dtype=np.uint16), np.array([0, 7, 10])
    rows = packing.DocumentRows(tokens, offsets, 4, answers)
    assert rows.read(np.arange(len(rows)))["tokens"].tolist() == [[7, 8, 9, 0]]
    assert (rows.num_cut, rows.num_left_out) == (1, 1)
    whole = packing.DocumentRows(tokens, offsets, 5, answers)
    batch = whole.read(np.arange(len(whole)))
    assert batch["tokens"][0].tolist() == [0, 1, 2, 3, 4]
    assert batch["weights"][0].tolist() == [0, 0, 0, 0, 1]
    assert (whole.num_cut, whole.num_left_out) == (1, 0)


def test_prepare_tells_lengths(prepared, monkeypatch, capsys):
    """Fails if the lengths of conversations are not printed."""
    meta = store.read_meta(str(prepared))
    monkeypatch.setattr(data_commands, "prepare", lambda *_, **__: meta)
    given = typed("data prepare", "--chat=x", f"--output={prepared}")
    data_commands.prepare_data(given)
    sizes = np.diff(np.fromfile(prepared / "train.idx", np.int64))
    assert data_commands.describe_lengths(sizes) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer_config.json", "{}", "has no chat template"),
        ("tokenizer_config.json", "[", "tokenizer_config.json' cannot be read (Exp"),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": "{% if %}"}),
            "has a chat template that cannot be read (TemplateSyntaxError: Expected an",
        ),
        (
            "chat_template.jinja",
            "{% if x %}" * 3000 + "{% endif %}" * 3000,
            "has a chat template that cannot be read (RecursionError: maximum",
        ),
        (
            "tokenizer.json",
            "{}",
            "tokenizer.json' is not a file of the tokenizers library",
        ),
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


QUESTION = TALKS[0][:2]


def config_of(path, **model):
    settings = {"data": {"source": "tokens", "path": str(path), "length": 256}}
    return load_config(settings | {"model": {"max_length": 256} | model})


def prompts_of(config, chat=""):
    return prompts.make_prompts(config.data, config.model.vocab_size, chat)


def question_of(config, most):
    return prompts.find_question(config.data, config.model.vocab_size, most)


def first_prompt(path):
    """The ids of the first training document up to its first answer."""
    opened = store.open_store(str(path), "train")
    size = int(np.argmax(opened.answers[: opened.offsets[1]]))
    return opened.tokens[:size].tolist()


def test_a_prompt_of_messages_is_what_training_has_before_the_answer(prepared):
    """Fails if special tokens of the template become text in a prompt."""
    made = prompts_of(config_of(prepared))
    ids = made.encode(prompts.as_talk(QUESTION)).tolist()
    assert ids == first_prompt(prepared)
    assert question_of(config_of(prepared), 256).tolist() == ids
    assert made.encode(prompts.as_talk({"messages": QUESTION})).tolist() == ids
    text = as_text(QUESTION) + "<s>assistant\n"
    assert (len(made.encode(text)), len(ids)) == (40, 32)
    assert made.encode(text, special_tokens=True).tolist() == ids
    assert made.encode([3, 4]).tolist() == [3, 4]
    short = question_of(config_of(prepared), len(ids) - 1)
    assert short is not None and len(short) < len(ids)
    assert question_of(config_of(prepared), 3) is None


def test_the_sample_of_a_run_on_conversations_is_one_of_them(prepared):
    """Fails if a chat model is shown as it continues `def `."""
    config = config_of(prepared)
    made = prompts_of(config)

    trainer = object.__new__(Trainer)  # untrained: prompts depend on settings alone
    trainer.config = config
    trainer._writer = Writer(config, None, writes_text=True)
    flag = typed("train")["prompt"]
    assert main.sample_prompt(trainer, flag).tolist() == first_prompt(prepared)
    flag = typed("train", "--prompt=What is two and two?")["prompt"]
    asked = main.sample_prompt(trainer, flag).tolist()
    message = {"role": "user", "content": "What is two and two?"}
    assert asked == made.encode(prompts.as_talk([message])).tolist()


def test_texts_that_may_be_meant_as_conversations_are_told_once(prepared, caplog):
    made = prompts_of(config_of(prepared))
    for text in ("<s>user", "<s>user", "plain"):
        made.encode(text)
    made.encode("<s>user", special_tokens=True)
    assert caplog.messages == [
        "a prompt spells <s> and is encoded as plain text; set special_tokens to "
        "encode the names as tokens, or give messages (--chat) for the chat template",
        "a prompt is plain text, but the run was trained on conversations; give "
        "messages (--chat) for the chat template",
    ]


def test_prompts_without_a_template_or_with_another_one_are_refused(
    prepared, checkpoint, tmp_path
):
    talk = prompts.as_talk(QUESTION)
    with config_error(
        "chat='' has no chat template: the tokenizer of the data is 'bytes'; name a "
        "checkpoint of this tokenizer that has one"
    ):
        prompts_of(load_config({})).encode(talk)
    with config_error(
        f"chat='{checkpoint}' has another tokenizer than the data, 'bytes'; name a "
        "checkpoint of this tokenizer that has one"
    ):
        prompts_of(load_config({}), str(checkpoint))
    same = prompts_of(config_of(prepared), str(checkpoint))
    assert same.encode(talk).tolist() == first_prompt(prepared)
    with pytest.raises(DataError) as error:
        same.encode(prompts.as_talk(TALKS[0]))
    assert str(error.value) == (
        "input='messages' ends with an answer in the conversation; end with the "
        "message that is to be answered"
    )
    for given in (5, "Why?"):
        with pytest.raises(DataError) as error:
            prompts.as_talk(given)
        assert str(error.value).startswith("input='messages' has no list of messages")


def test_an_answer_ends_where_the_checkpoint_of_the_template_says(
    prepared, checkpoint, tmp_path
):
    """Fails if `--chat` brings a template, but not the ids that end its answers."""
    shutil.copytree(checkpoint, tmp_path / "other")
    ends = {"eos_token_id": [7, 9]}
    (tmp_path / "other" / "generation_config.json").write_text(json.dumps(ends))
    config = config_of(prepared)
    mine = prompts_of(config).tokenizer.end_ids
    both = prompts_of(config, str(tmp_path / "other")).tokenizer.end_ids
    assert both == (*mine, 7, 9)
