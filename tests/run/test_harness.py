"""Log-probabilities of texts, and tasks of lm-evaluation-harness."""

import copy
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import language, small_run
from tests.support.refusals import config_error, package_error
from zjax.config import load_config
from zjax.data.prompts import Prompts
from zjax.data.tokenizer import load_tokenizer, train_bpe
from zjax.generation import programs
from zjax.run import harness
from zjax.run.harness import Continued, Scorer, evaluate_with_harness

ROWS = [
    ([5, 6, 7], [8, 9]),
    ([1], [2]),
    ([*range(20)], [3, 4]),
    ([9, 9], [9]),
    ([4, 3, 2, 1], [60]),
]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return small_run.fit(folder, "model.dropout_rate=0.0", num_devices=1)


def expected(trainer, context, wanted):
    """Of one row, by the module itself, without padding."""
    tokens = [*context, *wanted][-trainer.config.model.max_length - 1 :]
    model = trainer.run.bind(trainer.state)
    logits = language.logits_of(model, {"tokens": jnp.array([tokens[:-1]])})[0]
    logits = np.asarray(logits, np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    last = range(len(tokens) - 1 - len(wanted), len(tokens) - 1)
    total = sum(logits[place, tokens[place + 1]] for place in last)
    return total, all(logits[place].argmax() == tokens[place + 1] for place in last)


def continued(scorer, context, *until):
    [text] = scorer.continue_texts([Continued(context, until, 4)])
    return text


@pytest.mark.parametrize("num_rows", [1, 3])
def test_scores_are_those_of_the_module(trainer, num_rows):
    found = Scorer(trainer, num_rows=num_rows).score(ROWS)
    wanted = [expected(trainer, *row) for row in ROWS]
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], rtol=1e-5)
    assert [best for _, best in found] == [best for _, best in wanted]
    assert not any(best for _, best in found[1:3])


def test_what_the_model_writes_is_what_it_finds_most_likely(trainer):
    scorer = Scorer(trainer)
    text = continued(scorer, "5 6")
    assert f"5 6{text}" == trainer.generate("5 6", temperature=0.0, max_new_tokens=4)
    tokens = scorer.tokenizer.encode(text).tolist()
    (score, is_best), (other, is_other) = scorer.score(
        [([5, 6], tokens), ([5, 6], [*tokens[:-1], (tokens[-1] + 1) % 61])]
    )
    assert is_best
    assert not is_other
    assert score > other
    first = text.split()[0]
    assert continued(scorer, "5 6", text.split()[1]) == f" {first} "


def test_all_texts_of_a_call_share_weights_and_passes(trainer, monkeypatch):
    """Fails if each text cuts the weights again, or has the passes for itself."""
    cuts, reads = [], []
    cut, read = programs.CutDecoder.__init__, programs.Programs.read

    def count_cut(*given):
        cuts.append(given)
        cut(*given)

    def count_read(*given):
        reads.append(given)
        return read(*given)

    monkeypatch.setattr(programs.CutDecoder, "__init__", count_cut)
    monkeypatch.setattr(programs.Programs, "read", count_read)
    scorer = Scorer(trainer)
    stops = ("9",), ("9", "3"), (), ("9",)
    asked = [Continued(f"{i} 6", until, 5) for i, until in enumerate(stops * 2)]
    texts = scorer.continue_texts(asked)
    # Three settings: a pass for all prompts of each, and one for each further token.
    assert (len(cuts), len(reads)) == (1, 3 * 5)
    assert texts == [text for each in asked for text in scorer.continue_texts([each])]
    assert len(cuts) == 1 + len(asked)
    assert scorer.continue_texts([]) == []


def test_requests_of_the_harness_are_read_or_refused(trainer, monkeypatch):
    """Fails if the harness asks text by text, or a drawn text is greedy in silence."""
    model = types.SimpleNamespace(LM=object)
    package = types.SimpleNamespace(utils=None, api=types.SimpleNamespace(model=model))
    names = {"lm_eval": package, "lm_eval.api": package.api, "lm_eval.api.model": model}
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    scorer, asked = Scorer(trainer), []
    monkeypatch.setattr(scorer, "continue_texts", lambda given: asked.append(given))
    made = harness._make_model(scorer)
    settings = {"until": "9", "max_gen_toks": 3}, {"until": ["9", "8"]}, {}
    made.generate_until([types.SimpleNamespace(args=("5", x)) for x in settings])
    wanted = Continued("5", ("9",), 3), Continued("5", ("9", "8")), Continued("5")
    assert asked == [[*wanted]]
    with config_error("do_sample=True is not supported; use a greedy task"):
        made.generate_until([types.SimpleNamespace(args=("5", {"do_sample": True}))])


def test_a_continuation_longer_than_the_model_is_refused(trainer):
    with config_error(
        "continuation='...' has 17 tokens, more than model.max_length=16; "
        "score it in windows"
    ):
        Scorer(trainer).score([([1], [2] * 17)])


def test_a_text_may_be_as_long_as_the_positions(trainer, tmp_path):
    """Fails if scores of a model tuned on short rows read its last row alone."""
    positions = {"kind": "rotary", "max_positions": 32}
    changes = {"positions": positions, "dropout_rate": 0.0}
    other = small_run.fit(tmp_path, {"model": changes}, num_devices=1)
    row = [*range(20)], [3, 4]
    scorer, short = Scorer(other), Scorer(trainer)
    assert (scorer.max_length, short.max_length) == (32, 16)
    model = other.run.bind(other.state)
    logits = language.logits_of(model, {"tokens": jnp.array([[*row[0], 3]])})
    found = jax.nn.log_softmax(logits[0])
    (score, _), (cut, _) = *scorer.score([row]), *short.score([row])
    np.testing.assert_allclose(score, found[-2, 3] + found[-1, 4], rtol=1e-4)
    assert abs(score - cut) > 1e-3


def test_texts_begin_with_bos_once_and_follow_it_where_there_is_no_context(
    trainer, tmp_path
):
    """Fails if the end token stands where BOS belongs, or BOS stands twice."""
    library = train_bpe(["user asks"], 260)
    library.add_special_tokens(["<bos>", "<end>"])
    library.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    values = {"bos_token": "<bos>", "eos_token": "<end>", "chat_template": template}
    values |= {"add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    scorer = copy.copy(Scorer(trainer))
    assert scorer.prefix_id == 60  # numbers have no BOS
    scorer.tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    scorer.prompts = Prompts(scorer.tokenizer, str(tmp_path))
    bos, end = scorer.prefix_id, scorer.tokenizer.end_id
    a, b = scorer.encode_inner("a"), scorer.encode_inner(" b")
    assert (bos, end) == (260, 261) and bos not in [*a, *b]
    assert scorer.encode_pair("", " b") == ([bos], b)
    assert scorer.encode_pair(" ", "b") == ([bos], b)
    assert scorer.encode_pair("a ", "b") == ([bos, *a], b)
    assert end not in scorer.encode_pair("a<end>", "b")[0]
    text = scorer.render([{"role": "user", "content": "a"}], asks=True)
    assert text == "<bos>a<end>"
    assert scorer.encode_pair(text, " b") == ([bos, *a, end], b)


def test_a_text_without_context_follows_the_prefix(trainer):
    """Fails if an empty context is refused, or ends with another token."""
    scorer = Scorer(trainer)
    assert continued(scorer, "") == continued(scorer, str(scorer.prefix_id))


def test_an_encoder_is_refused(trainer):
    encoder = copy.copy(trainer)
    encoder.config = load_config(trainer.config, "model.kind=encoder")
    with config_error(
        "model.kind='encoder' writes no text; give a run of the built-in decoder"
    ):
        Scorer(encoder)


def test_without_the_harness_the_package_is_named(trainer, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with package_error(
        "package='lm_eval' is not installed, and tasks of the evaluation harness need "
        "it; pip install lm_eval"
    ):
        evaluate_with_harness(trainer, ["any"])


def test_tasks_of_the_harness_have_the_scores_of_their_rows(trainer, tmp_path):
    """A task of choices, one of perplexity and one of text, of files of ours."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    docs = [
        {"context": "5 6 7", "choices": ["8 9", "1 2", "60 3"], "gold": 1},
        {"context": "4 3 2", "choices": ["1 1", "7 7", "50 5"], "gold": 0},
    ]
    path = tmp_path / "docs.json"
    path.write_text("\n".join(map(json.dumps, docs)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
    }
    tasks = [
        {
            **common,
            "task": "choices",
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
        },
        {
            **common,
            "task": "perplexity",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{context}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        {
            **common,
            "task": "text",
            "output_type": "generate_until",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]
    found = evaluate_with_harness(trainer, tasks, bootstrap_iters=0)
    results = found["results"]

    def ids(text):
        return list(map(int, text.split()))

    def scores(doc):
        return [
            expected(trainer, ids(doc["context"]), ids(x))[0] for x in doc["choices"]
        ]

    accuracy = np.mean([np.argmax(scores(doc)) == doc["gold"] for doc in docs])
    assert results["choices"]["acc,none"] == pytest.approx(accuracy)
    end = Scorer(trainer).tokenizer.end_id
    total = sum(expected(trainer, [end], ids(doc["context"]))[0] for doc in docs)
    assert results["perplexity"]["word_perplexity,none"] == pytest.approx(
        np.exp(-total / 6), rel=1e-4
    )
    assert results["text"]["exact_match,none"] in (0.0, 0.5, 1.0)
    texts = [sample["resps"][0][0] for sample in found["samples"]["text"]]
    assert texts == [
        trainer.generate(d["context"], temperature=0.0, max_new_tokens=3)[
            len(d["context"]) :
        ]
        for d in docs
    ]
