"""lm-evaluation-harness asks a server as it asks others of OpenAI's API."""

import json

import pytest

from tests.support import programs, small_llama
from tests.support.serving import served
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling

DOCS = [{"text": "Once", "wanted": "a"}, {"text": "upon a", "wanted": "b"}]
CHOICES = [" time", " a tree", "é"]
REASON = "lm_eval is not installed, and takes transformers and datasets along"


def make_task(tmp_path, **settings):
    """A task of lm_eval with the documents above."""
    (tmp_path / "docs.json").write_text("\n".join(map(json.dumps, DOCS)))
    return {
        "task": "text",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.json")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{wanted}}",
        "target_delimiter": "",
    } | settings


def model_args(server, path, folder, **settings):
    """Arguments of the models of lm_eval that ask a server."""
    return {
        "model": "llama",
        "base_url": server.address + path,
        "tokenizer_backend": "huggingface",
        "tokenizer": str(folder),
    } | settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_llama.write(tmp_path_factory.mktemp("harness") / "llama")


@pytest.fixture(scope="module")
def server(folder):
    pytest.importorskip("lm_eval", reason=REASON)
    pytest.importorskip("transformers", reason=REASON)
    with served(f"--model={folder}", "--max_rows=4") as server:
        yield server
        programs.wait_until(server.is_idle, server.program)


def ask_likelihoods(server, folder, task, **settings):
    """What lm_eval is told of the texts of a task, in the order of the documents."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=model_args(server, "/v1/completions", folder, **settings),
        tasks=[task],
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["text"], key=lambda sample: sample["doc_id"])
    return [resp[0] for sample in samples for resp in sample["resps"]]


def score(folder, prompts):
    """Scores of prompts by a generator of the same weights, without a server."""
    with Generator(str(folder), max_rows=4) as generator:
        return generator.generate(prompts, Sampling(prompt_logprobs=1))


@pytest.mark.parametrize(
    "settings",
    [{"num_concurrent": 2}, {"batch_size": 3}, {"tokenized_requests": False}],
)
def test_tasks_of_likelihoods_get_the_scores_of_the_model(
    settings, server, folder, tmp_path
):
    """Fails if a score is of another token, or lacks one at an end."""
    kind = {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    targets = {"doc_to_choice": CHOICES, "doc_to_target": 0}
    task = make_task(tmp_path, **kind, **targets)
    found = ask_likelihoods(server, folder, task, **settings)
    pairs = [(doc["text"], choice) for doc in DOCS for choice in CHOICES]
    prompts = [[*(text + choice).encode()] for text, choice in pairs]
    texts = score(folder, prompts)
    sums, greedy = [], []
    for (start, _), text in zip(pairs, texts, strict=True):
        sums.append(sum(text.prompt_logprobs[len(start) :]))
        best = [next(iter(x)) for x in text.prompt_best[len(start) :]]
        greedy.append(best == text.prompt_ids[len(start) :])
    # Rows beside others may be rounded in another way, in bfloat16.
    assert [float(x) for x, _ in found] == pytest.approx(sums, abs=0.1)
    assert [x for _, x in found] == greedy
    assert len({round(value, 1) for value in sums}) == len(sums)


def test_tasks_of_whole_texts_get_the_scores_of_the_model(server, folder, tmp_path):
    """Fails if the first token of a text is not scored behind the end of a text."""
    kind = {"output_type": "loglikelihood_rolling", "doc_to_text": ""}
    metrics = {"metric_list": [{"metric": "bits_per_byte"}]}
    task = make_task(tmp_path, **kind, **metrics, doc_to_target="{{text}}")
    found = ask_likelihoods(server, folder, task)
    texts = score(folder, [[256, *doc["text"].encode()] for doc in DOCS])
    wanted = [sum(text.prompt_logprobs[1:]) for text in texts]
    assert [float(x) for x in found] == pytest.approx(wanted, abs=0.1)


@pytest.mark.parametrize("name", ["local-completions", "local-chat-completions"])
def test_tasks_of_text_get_the_texts_of_the_server(name, tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason=REASON)
    pytest.importorskip("transformers", reason=REASON)
    folder = small_llama.write(tmp_path / "llama")
    task = make_task(
        tmp_path,
        output_type="generate_until",
        generation_kwargs={"until": ["~~"], "max_gen_toks": 6},
        metric_list=[{"metric": "exact_match"}],
    )
    is_chat = "chat" in name
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    with served(f"--model={folder}", "--max_rows=2") as server:
        found = lm_eval.simple_evaluate(
            model=name,
            model_args=model_args(
                server, path, folder, tokenized_requests=not is_chat, num_concurrent=2
            ),
            tasks=[task],
            bootstrap_iters=0,
            apply_chat_template=is_chat,
        )
        texts = [sample["resps"][0][0] for sample in found["samples"]["text"]]
        asked = {"temperature": 0, "max_tokens": 6, "stop": ["~~", "<|end|>"]}
        wanted = []
        for doc in DOCS:
            if is_chat:
                talk = [{"role": "user", "content": doc["text"]}]
                choice = server.ask(path, messages=talk, **asked)[1]["choices"][0]
                wanted.append(choice["message"]["content"])
            else:
                reply = server.ask(path, prompt=doc["text"], **asked)[1]
                wanted.append(reply["choices"][0]["text"])
        assert texts == wanted
        assert found["results"]["text"]["exact_match,none"] in (0.0, 0.5, 1.0)
        programs.wait_until(server.is_idle, server.program)
