"""lm-evaluation-harness asks a server as it asks others of OpenAI's API."""

import json

import pytest

from tests.support import programs, small_llama
from tests.support.serving import served

DOCS = [{"text": "Once", "wanted": "a"}, {"text": "upon a", "wanted": "b"}]


@pytest.mark.parametrize("name", ["local-completions", "local-chat-completions"])
def test_tasks_of_text_get_the_texts_of_the_server(name, tmp_path):
    reason = "lm_eval is not installed, and takes transformers and datasets along"
    lm_eval = pytest.importorskip("lm_eval", reason=reason)
    pytest.importorskip("transformers", reason=reason)
    folder = small_llama.write(tmp_path / "llama")
    (tmp_path / "docs.json").write_text("\n".join(map(json.dumps, DOCS)))
    task = {
        "task": "text",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.json")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{wanted}}",
        "generation_kwargs": {"until": ["~~"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    }
    is_chat = "chat" in name
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    with served(f"--model={folder}", "--max_rows=2") as server:
        found = lm_eval.simple_evaluate(
            model=name,
            model_args={
                "model": "llama",
                "base_url": server.address + path,
                "tokenizer_backend": "huggingface",
                "tokenizer": str(folder),
                "tokenized_requests": not is_chat,
                "num_concurrent": 2,
            },
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
