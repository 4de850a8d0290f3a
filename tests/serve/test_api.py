"""Clients of a server in a process of its own get what OpenAI's API promises."""

import http.client
import json

import openai
import pytest

from tests.support import programs, small_llama
from tests.support.serving import JSON, SECONDS, served
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
TALK = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Why?"}]
MAX_BODY, MAX_REQUESTS = 100_000, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_llama.write(tmp_path_factory.mktemp("served") / "llama")


@pytest.fixture(scope="module")
def server(folder):
    limits = f"--max_body_bytes={MAX_BODY}", f"--max_requests={MAX_REQUESTS}"
    limits += "--max_request_rows=6", "--max_prompt_tokens=1500", "--max_rows=8"
    with served(f"--model={folder}", *limits) as server:
        yield server
        programs.wait_until(server.is_idle, server.program)


@pytest.fixture(scope="module")
def client(server):
    settings = {"api_key": "none", "timeout": SECONDS, "max_retries": 0}
    with openai.OpenAI(base_url=f"{server.address}/v1", **settings) as client:
        yield client


def texts_of(reply):
    return [choice["text"] for choice in reply["choices"]]


def test_the_start_tells_what_is_served_and_how_to_try(server):
    *_, serving, limits, line = server.said
    assert serving.startswith(f"serving 'llama' at {server.address}/v1 on cpu")
    assert limits == (
        "limits: prompts of 1,500 tokens, 2,048 with a text; 4 requests at once, each "
        "of 6 texts, 100,000 bytes and 600 s\n"
    )
    assert line.startswith(f"try: curl {server.address}/v1/completions -H ")


def test_a_completion_has_text_reason_and_usage(server):
    status, reply = server.ask(prompt="Once", model="llama", **GREEDY)
    assert status == 200
    [choice] = reply["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert choice["text"]
    assert reply["object"] == "text_completion" and reply["model"] == "llama"
    wanted = {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    assert reply["usage"] == wanted
    assert server.ask(prompt="Once", **GREEDY)[1]["choices"] == reply["choices"]


def test_prompts_are_texts_or_ids_one_or_several(server):
    """Fails if a list loses a prompt, or samples of prompts are mixed up."""
    prompts = ["Once", "upon"]
    ids = [[*prompt.encode()] for prompt in prompts]
    # Short, as rows beside others may be rounded in another way.
    greedy = GREEDY | {"max_tokens": 5}
    alone = [texts_of(server.ask(prompt=x, **greedy)[1])[0] for x in prompts]
    assert alone[0] != alone[1]
    for both in (prompts, ids):
        reply = server.ask(prompt=both, **greedy)[1]
        assert texts_of(reply) == alone
        assert [x["index"] for x in reply["choices"]] == [0, 1]
        assert reply["usage"]["prompt_tokens"] == 8
    assert texts_of(server.ask(prompt=ids[0], **greedy)[1]) == alone[:1]


def test_draws_depend_on_the_seed_and_differ_between_samples(server):
    first = texts_of(server.ask(prompt=["a", "a"], n=2, **DRAWN)[1])
    assert len({*first}) == 4
    assert texts_of(server.ask(prompt=["a", "a"], n=2, **DRAWN)[1]) == first
    fewer = texts_of(server.ask(prompt="a", n=2, **DRAWN)[1])
    # Rows beside others may be rounded in another way, which shows later if at all.
    assert [x[:4] for x in fewer] == [x[:4] for x in first[:2]]
    other = server.ask(prompt="a", n=2, **(DRAWN | {"seed": 6}))[1]
    assert texts_of(other) != first[:2]
    # Hot, as a text that repeats one letter is likely else.
    free = DRAWN | {"seed": None, "temperature": 2.0}
    assert len({texts_of(server.ask(prompt="a", **free)[1])[0] for _ in range(4)}) > 1


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 3}, {"echo": True}, {"logprobs": 3, "echo": True}]
)
def test_a_stream_adds_up_to_the_whole_reply(server, fields):
    asked = {"prompt": ["Once", "upon"], "n": 2} | DRAWN | fields
    whole = server.ask(**asked)[1]
    options = {"include_usage": True}
    *events, last = server.events(stream_options=options, **asked)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events)
    assert len(events) > 4
    for choice in whole["choices"]:
        news = [x["choices"][0] for x in events]
        news = [x for x in news if x["index"] == choice["index"]]
        assert "".join(x["text"] for x in news) == choice["text"]
        reasons = [x["finish_reason"] for x in news]
        assert reasons == [None] * (len(news) - 1) + [choice["finish_reason"]]
        if fields.get("logprobs"):
            for name, values in choice["logprobs"].items():
                found = [value for x in news for value in x["logprobs"][name]]
                assert len(found) == (16 if "echo" in fields else 12)
                assert (
                    found == values if name == "tokens" else len(found) == len(values)
                )


def test_stop_strings_cut_the_text(server):
    whole = texts_of(server.ask(prompt="Once", **DRAWN)[1])[0]
    stop = whole[4:6]
    reply = server.ask(prompt="Once", stop=["never there", stop], **DRAWN)[1]
    assert texts_of(reply) == [whole[: whole.index(stop)]]
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] < 12


def test_end_ids_end_the_text(server):
    ids = {"logprobs": 0, "prompt": "Once"}
    whole = server.ask(**ids, **GREEDY)[1]["choices"][0]["logprobs"]
    place = next(n for n, x in enumerate(whole["tokens"]) if x != "\ufffd" and n)
    ends = [*whole["tokens"][place].encode()]
    reply = server.ask(prompt="Once", stop_token_ids=ends, **GREEDY)[1]
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] <= place + 1
    least = {"min_tokens": 12, "stop_token_ids": ends}
    reply = server.ask(prompt="Once", **least, **GREEDY)[1]
    assert reply["usage"]["completion_tokens"] == 12


def test_log_probabilities_stand_beside_tokens(server):
    reply = server.ask(prompt="Once", logprobs=3, **GREEDY)[1]
    found = reply["choices"][0]["logprobs"]
    assert {len(values) for values in found.values()} == {12}
    for logprob, best in zip(
        found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert logprob == max(best.values()) <= 0
        assert 1 <= len(best) <= 3
    sizes = [len(token) for token in found["tokens"]]
    assert found["text_offset"] == [sum(sizes[:n]) for n in range(12)]


@pytest.fixture(scope="module")
def scored(folder):
    """Scores of prompts by a generator of the same weights, without a server."""
    found, prompts = {}, ["Once", "é", "a" * 100]
    with Generator(str(folder), max_rows=2) as generator:
        sampling = Sampling(prompt_logprobs=2, max_new_tokens=1, num_logprobs=2)
        for prompt, text in zip(
            prompts, generator.generate(prompts, sampling), strict=True
        ):
            assert text.prompt_ids == [*prompt.encode()]
            found[prompt] = text
    return found


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_scored(server, scored, max_tokens):
    """Fails if a token of a prompt has the score of another, or a text is doubled."""
    asked = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    prompts = [*scored]
    ids = [[*prompt.encode()] for prompt in prompts]
    status, reply = server.ask(prompt=ids, **asked)
    assert status == 200
    num_read = sum(map(len, ids))
    assert reply["usage"] == {
        "prompt_tokens": num_read,
        "completion_tokens": 3 * max_tokens,
        "total_tokens": num_read + 3 * max_tokens,
    }
    for choice, prompt in zip(reply["choices"], prompts, strict=True):
        text, size = scored[prompt], len(prompt.encode()) + max_tokens
        assert choice["text"] == prompt + (text.text if max_tokens else "")
        assert choice["finish_reason"] == "length"
        found = choice["logprobs"]
        assert {len(values) for values in found.values()} == {size}
        names = [chr(x) if x < 128 else "\ufffd" for x in prompt.encode()]
        assert found["tokens"][: len(names)] == names
        assert found["text_offset"] == [*range(size)]
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        wanted = [*text.prompt_logprobs, *text.logprobs][1:size]
        # Rows beside others may be rounded in another way.
        close = {"abs": 0.03}
        assert found["token_logprobs"][1:] == pytest.approx(wanted, **close)
        best = [*text.prompt_best, *text.best][1:size]
        for top, wanted in zip(found["top_logprobs"][1:], best, strict=True):
            assert max(top.values()) == pytest.approx(max(wanted.values()), **close)
            assert len(top) <= 3
    alone = server.ask(prompt=prompts[0], **asked)[1]["choices"][0]
    assert alone["logprobs"]["tokens"] == reply["choices"][0]["logprobs"]["tokens"]
    programs.wait_until(server.is_idle, server.program)


def test_limits_hold_for_prompts_to_score(server):
    scores = {"echo": True, "logprobs": 0, "max_tokens": 0}
    assert server.ask(prompt="a" * 1500, **scores)[0] == 200
    assert refusal_of(server, prompt="a" * 1501, **scores)[0] == "prompt"
    assert refusal_of(server, prompt="a", n=2, **scores) == (
        "n",
        "n=2 would be empty texts at max_tokens=0; use 1",
    )
    assert refusal_of(server, prompt="a", min_tokens=2, **scores)[0] == "min_tokens"
    assert refusal_of(server, prompt=["a"] * 7, **scores)[0] == "n"


def test_chats_go_through_the_template(server):
    """Fails if roles are dropped, or the answer's turn is not opened."""
    ids = [257, *b"Be.", 256, 258, *b"Why?", 256, 259]
    written = server.ask(prompt=ids, **GREEDY)[1]
    asked = {"temperature": 0, "max_completion_tokens": 12, "ignore_eos": True}
    status, reply = server.ask("/v1/chat/completions", messages=TALK, **asked)
    assert status == 200
    [choice] = reply["choices"]
    wanted = {"role": "assistant", "content": texts_of(written)[0]}
    assert choice["message"] == wanted
    assert reply["usage"] == written["usage"]
    assert reply["object"] == "chat.completion"


def test_the_client_of_openai_reads_replies_and_streams(client):
    assert [model.id for model in client.models.list()] == ["llama"]
    assert client.models.retrieve("llama").model_extra["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    asked = {"model": "llama", "seed": 3, "max_tokens": 8, "n": 2}
    asked |= {"extra_body": {"ignore_eos": True}, "messages": TALK}
    shown = {"logprobs": True, "top_logprobs": 2}
    reply = client.chat.completions.create(**asked, **shown)
    assert [choice.finish_reason for choice in reply.choices] == ["length"] * 2
    for choice in reply.choices:
        assert len(choice.logprobs.content) == 8
        assert {len(token.top_logprobs) for token in choice.logprobs.content} == {2}
    stream = client.chat.completions.create(**asked, stream=True)
    texts = ["", ""]
    roles = [0, 0]
    for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
    assert texts == [choice.message.content for choice in reply.choices]
    assert roles == [1, 1]
    scores = {"echo": True, "logprobs": 1, "max_tokens": 0}
    reply = client.completions.create(model="llama", prompt="Once", **scores)
    assert reply.choices[0].text == "Once"
    assert len(reply.choices[0].logprobs.token_logprobs) == 4
    written = client.completions.create(model="llama", prompt="Once", max_tokens=3)
    assert written.usage.prompt_tokens == 4


def test_the_client_of_openai_is_told_what_is_not_served(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt", prompt="a")
    assert error.value.code == "model_not_found"
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="llama", messages=TALK, tools=tools)
    assert error.value.param == "tools"
    assert "tools=" in error.value.message and "is not supported" in error.value.message


def refusal_of(server, path="/v1/completions", **fields):
    status, reply = server.ask(path, **fields)
    assert status == 400, reply
    assert reply["error"]["type"] == "invalid_request_error"
    return reply["error"]["param"], reply["error"]["message"]


def test_what_the_model_cannot_do_is_refused_under_the_names_of_the_api(server):
    """Fails if a name of the generator reaches a client."""
    assert refusal_of(server, prompt="a", max_tokens=2048) == (
        "max_tokens",
        "max_tokens=2048 after 1 tokens is more than 2048; ask for 2047 or fewer, or "
        "shorten the prompt",
    )
    param, message = refusal_of(server, prompt=["a", "b"], stop_token_ids=[260])
    assert param == "stop_token_ids" and message.count("\n") == 0
    assert "has 260, which is no id of 260" in message
    assert refusal_of(server, prompt=[[1], [260]])[0] == "prompt"
    assert refusal_of(server, prompt="a", n=7) == (
        "n",
        "n=7 for 1 prompts is more than 6 texts; send smaller requests",
    )
    assert refusal_of(server, prompt=["a"] * 7)[0] == "n"
    assert refusal_of(server, prompt="a" * 1501) == (
        "prompt",
        "prompt has 1501 tokens, more than 1500; shorten it",
    )
    assert refusal_of(server, prompt="a" * 2048) == (
        "prompt",
        "prompt='aaaaaaaaaaaaaaaaaaaa' has 2048 tokens, and prompt and text together "
        "have at most 2048; shorten it",
    )
    chat = "/v1/chat/completions"
    talk = [{"role": "user", "content": "a" * 2048}]
    assert refusal_of(server, chat, messages=talk)[0] == "messages"
    talk = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    assert refusal_of(server, chat, messages=talk)[0] == "messages"
    ends_with_answer = [*TALK, {"role": "assistant", "content": "So."}]
    assert refusal_of(server, chat, messages=ends_with_answer)[0] == "messages"
    programs.wait_until(server.is_idle, server.program)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": ', "the body cannot be read as JSON ("),
        (b'{"prompt": "\xff"}', "the body cannot be read as JSON ("),
        (b'{"temperature": NaN}', "the body cannot be read as JSON (NaN is no JSON)"),
        (b"[" * 90_000, "the body cannot be read as JSON (it is nested too deep)"),
        (b"[1]", "the body is no JSON object; send one, such as {...}"),
        (b"", "the body cannot be read as JSON ("),
    ],
    ids=["half", "bytes", "nan", "deep", "list", "empty"],
)
def test_what_is_not_json_is_refused(server, body, message):
    status, _, text = server.request("POST", "/v1/completions", body, JSON)
    error = json.loads(text)["error"]
    assert (status, error["code"]) == (400, "invalid_json")
    assert error["message"].startswith(message)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server):
    """Fails if a server without a length to go by reads on for ever."""
    with server.connected() as connection:
        connection.putrequest("POST", "/v1/completions")
        for pair in (("content-length", str(10 * MAX_BODY)), *JSON.items()):
            connection.putheader(*pair)
        connection.endheaders()
        assert connection.getresponse().status == 413
    large = b" " * (MAX_BODY + 1)
    status, _, text = server.request("POST", "/v1/completions", large, JSON)
    wanted = "the body has more than 100000 bytes; send fewer"
    assert (status, json.loads(text)["error"]["message"]) == (413, wanted)
    with server.connected() as connection:
        connection.putrequest("POST", "/v1/completions")
        for pair in (("transfer-encoding", "chunked"), *JSON.items()):
            connection.putheader(*pair)
        connection.endheaders()
        try:
            for _ in range(1000):
                connection.send(b"400\r\n" + b" " * 1024 + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):
            return
        assert connection.getresponse().status == 413


def test_web_pages_reach_nothing(server):
    """Fails if a page of a browser on this machine can ask, by form or by name."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    plain = {"content-type": "text/plain"}
    assert server.request("POST", "/v1/completions", body, plain)[0] == 415
    status, _, text = server.request(
        "POST", "/v1/completions", body, JSON | {"host": "evil.example:80"}
    )
    assert (status, json.loads(text)["error"]["code"]) == (403, "host_not_allowed")


def test_other_paths_and_methods_are_refused_in_the_form_of_the_api(server):
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/", 404),
    ):
        found, _, text = server.request(method, path, headers=JSON)
        assert found == status
        message = json.loads(text)["error"]["message"]
        assert message == f"{method} {path} is not served; see docs/serving.md"


def test_one_request_too_many_waits_for_another_time(server):
    """Fails if requests are queued without a bound, or refused for ever."""
    long = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
    streams = [server.open_stream(**long) for _ in range(MAX_REQUESTS)]
    try:
        for stream in streams:
            assert stream.recv(12) == b"HTTP/1.1 200"
        body = json.dumps({"prompt": "a"}).encode()
        status, headers, text = server.request("POST", "/v1/completions", body, JSON)
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(text)["error"]["code"] == "rate_limit_exceeded"
        assert server.get("/health") == (200, '{"status":"ok"}')
    finally:
        for stream in streams:
            stream.close()
    programs.wait_until(server.is_idle, server.program)
    assert server.ask(prompt="a", max_tokens=1)[0] == 200


def test_metrics_count_requests_and_tokens(server):
    programs.wait_until(server.is_idle, server.program)
    before = server.metrics()
    server.ask(prompt="Once", n=2, **DRAWN)
    server.ask(prompt="Once", nn=2)
    programs.wait_until(server.is_idle, server.program)
    after = server.metrics()

    def rise(name):
        return after[name] - before.get(name, 0)

    path = 'endpoint="/v1/completions"'
    assert rise(f'zjax_requests_total{{{path},status="200"}}') == 1
    assert rise(f'zjax_requests_total{{{path},status="400"}}') == 1
    assert rise("zjax_request_seconds_count") == 2
    assert rise("zjax_tokens_written_total") == 24
    assert rise("zjax_tokens_read_total") == 8
    assert rise("zjax_drafts_total") >= rise("zjax_drafts_accepted_total") >= 0
    assert rise("zjax_time_to_first_token_seconds_count") == 2
    assert rise("zjax_time_per_output_token_seconds_count") > 0


def test_a_connection_serves_several_requests(server):
    with server.connected() as connection:
        for _ in range(3):
            body = b'{"prompt": "a", "max_tokens": 1}'
            connection.request("POST", "/v1/completions", body, JSON)
            reply = connection.getresponse()
            assert (reply.status, bool(json.loads(reply.read()))) == (200, True)
        assert isinstance(connection, http.client.HTTPConnection)
