"""Requests are read as they are meant, and refused by the name of each field."""

import pytest

from tests.support.refusals import refused
from zjax.generation.sampling import Sampling
from zjax.serve.fields import read_object
from zjax.serve.refusals import Refusal, refuse_problems
from zjax.serve.requests import COMPLETION_NAMES, Asked, read_chat, read_completion

ENDS = (7, 9)
TALK = [{"role": "user", "content": "Why?"}]


def completion(**fields):
    return read_completion(fields, "model", ENDS)


def chat(**fields):
    return read_chat(fields, "model", ENDS)


def test_a_completion_has_the_defaults_of_the_api():
    asked = completion(prompt="a", seed=0)
    sampling = Sampling(max_new_tokens=16, temperature=1.0)
    assert asked == Asked(["a"], sampling, is_streamed=False, has_usage=False)
    assert completion(prompt="a", seed=0, n=None, stop=None, user=None) == asked
    assert len({completion(prompt="a").sampling.seed for _ in range(3)}) > 1


def test_every_field_of_a_completion_is_read():
    asked = completion(
        model="model",
        prompt=[[1, 2], [3]],
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=11,
        min_p=0.125,
        n=2,
        stop=["x", "yz"],
        seed=-1,
        logprobs=4,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        min_tokens=3,
        stop_token_ids=[9, 5],
        stream=True,
        stream_options={"include_usage": True},
        special_tokens=True,
        echo=False,
    )
    sampling = Sampling(
        max_new_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=11,
        min_p=0.125,
        num_samples=2,
        stop=("x", "yz"),
        seed=2**32 - 1,
        num_logprobs=4,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        min_new_tokens=3,
        end_ids=(7, 9, 5),
    )
    assert asked == Asked([[1, 2], [3]], sampling, True, True, False, True)
    assert completion(prompt="a", ignore_eos=True).sampling.end_ids == ()
    assert completion(prompt="a", top_k=-1).sampling.top_k == 0
    assert completion(prompt="a", echo=True).echoes
    assert completion(prompt="a", echo=True).sampling.prompt_logprobs is None
    assert completion(prompt="a", logprobs=2).sampling.prompt_logprobs is None
    scored = completion(prompt="a", echo=True, logprobs=2, max_tokens=0).sampling
    assert (scored.num_logprobs, scored.prompt_logprobs) == (2, 2)
    assert scored.scores_alone


def test_every_field_of_a_chat_is_read():
    asked = chat(messages=TALK, logprobs=True, top_logprobs=3, max_completion_tokens=5)
    assert asked.prompts[0].messages == TALK
    assert asked.sampling.max_new_tokens == 5
    assert asked.sampling.num_logprobs == 3
    assert chat(messages=TALK).sampling.max_new_tokens == 0
    assert chat(messages=TALK, max_tokens=4).sampling.max_new_tokens == 4
    assert chat(messages=TALK, logprobs=True).sampling.num_logprobs == 0
    assert chat(messages=TALK).sampling.num_logprobs is None
    options = {"enable_thinking": False}
    asked = chat(messages=TALK, chat_template_kwargs=options)
    assert asked.prompts[0].options == options


NOTHING = [
    (completion, {"prompt": "a"}, {"best_of": 1, "suffix": "", "logit_bias": {}}),
    (
        chat,
        {"messages": TALK},
        {
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "store": False,
            "service_tier": "auto",
            "n": 1,
        },
    ),
]


@pytest.mark.parametrize(("read", "given", "fields"), NOTHING)
def test_fields_that_ask_for_nothing_are_taken(read, given, fields):
    assert read(**given, **fields, seed=1) == read(**given, seed=1)


REFUSED = [
    (completion, {}, "prompt=None is missing; write a text, a list of texts, token "
     "ids, or a list of lists of ids"),
    (completion, {"prompt": []}, "prompt=[] is no prompt; write a text, a list of "
     "texts, token ids, or a list of lists of ids"),
    (completion, {"prompt": ["a", [1]]}, "prompt=['a', [1]] is no prompt; write a "
     "text, a list of texts, token ids, or a list of lists of ids"),
    (completion, {"prompt": [True]}, "prompt=[True] is no prompt; write a text, a "
     "list of texts, token ids, or a list of lists of ids"),
    (chat, {}, "messages=None is missing; write "
     '[{"role": "user", "content": "..."}]'),
    (chat, {"messages": "a"}, "messages='a' is no list of messages; write "
     '[{"role": "user", "content": "..."}]'),
    (chat, {"messages": ["a"]}, "messages='messages' has no role in message 1 in the "
     'conversation; write {"role": "user", "content": "..."}'),
    (chat, {"messages": TALK, "top_logprobs": 2}, "top_logprobs=2 needs logprobs; set "
     "logprobs to true"),
    (chat, {"messages": TALK, "max_tokens": 3, "max_completion_tokens": 4},
     "max_tokens=3 is max_completion_tokens, too; leave it out"),
    (chat, {"messages": TALK, "functions": [1], "user": "me"},
     "functions=[1] is not supported; leave it out\n"
     "user='me' is not supported; leave it out"),
    (completion, {"prompt": "a", "max_tokens": 0}, "max_tokens=0 writes nothing; ask "
     "for 1 or more, or for scores of the prompt by echo and logprobs"),
    (completion, {"prompt": "a", "max_tokens": 0, "logprobs": 1}, "max_tokens=0 writes "
     "nothing; ask for 1 or more, or for scores of the prompt by echo and logprobs"),
    (completion, {"prompt": "a", "max_tokens": 0, "echo": True}, "max_tokens=0 writes "
     "nothing; ask for 1 or more, or for scores of the prompt by echo and logprobs"),
    (completion, {"prompt": "a", "max_tokens": -1, "echo": True, "logprobs": 1},
     "max_tokens=-1 is no integer from 0 to 2147483647; write one in the range"),
    (completion, {"prompt": "a", "max_tokens": True, "n": 1.0},
     "max_tokens=True is no integer from 0 to 2147483647; write one in the range\n"
     "n=1.0 is no integer from 1 to 2147483647; write one in the range"),
    (completion, {"prompt": "a", "temperature": 2.5, "top_p": "1"},
     "temperature=2.5 is no number from 0 to 2; write one in the range\n"
     "top_p='1' is no number from 0 to 1; write one in the range"),
    (completion, {"prompt": "a", "frequency_penalty": 1e300},
     "frequency_penalty=1e+300 is no number from -2 to 2; write one in the range"),
    (completion, {"prompt": "a", "stop": ["a", ""]}, "stop=['a', ''] is no text or "
     'list of texts; write one, such as ["\\n"]'),
    (completion, {"prompt": "a", "stop": ["a"] * 65}, f"stop={['a'] * 65} has 65 "
     "texts; give at most 64"),
    (completion, {"prompt": "a", "logprobs": 21}, "logprobs=21 is no integer from 0 to "
     "20; write one in the range"),
    (completion, {"prompt": "a", "stream_options": {}}, "stream_options={} needs a "
     "stream; leave it out, or set stream to true"),
    (completion, {"prompt": "a", "stream": True, "stream_options": {"usag": True}},
     "stream_options.usag=True is no field; leave it out"),
    (completion, {"prompt": "a", "top_pp": 1, "zzz": 2},
     "top_pp=1 is no field; did you mean top_p?\nzzz=2 is no field; leave it out"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "fields", "message"), REFUSED)
def test_a_field_is_refused_by_name(read, fields, message):
    with refused(Refusal, message):
        read(**fields)


def test_a_refusal_names_the_first_field_for_programs():
    with pytest.raises(Refusal) as error:
        completion(prompt="a", n=0, zzz=1)
    assert error.value.body == {
        "error": {
            "message": str(error.value),
            "type": "invalid_request_error",
            "param": "n",
            "code": None,
        }
    }


def test_many_unknown_fields_take_no_time_each():
    """Fails if a body of a million names is compared with every known name."""
    with pytest.raises(Refusal) as error:
        completion(prompt="a", **{f"field_{n}" * 100: n for n in range(100)})
    lines = str(error.value).splitlines()
    assert len(lines) == 10 and max(map(len, lines)) < 100


def test_a_number_beyond_all_floats_is_out_of_range():
    with pytest.raises(
        Refusal, match=r"is no number from 0 to 2; write one in"
    ) as error:
        completion(prompt="a", temperature=10**400)
    assert error.value.param == "temperature"


@pytest.mark.parametrize("body", [rb'{"prompt":"\ud800"}', rb'{"\uDC00":1}'])
def test_half_a_character_is_refused(body):
    """Fails if a tokenizer, or a reply, meets text that cannot be encoded."""
    text = "the body has half a character (a lone surrogate); send whole ones"
    with refused(Refusal, text):
        read_object(body)
    assert read_object(rb'{"a":"\ud83d\ude00\u00e9"}') == {"a": "\U0001f600\xe9"}


def test_another_model_is_not_found():
    with refused(Refusal, "model='gpt' is not served; use 'model'"):
        completion(prompt="a", model="gpt")


def test_a_problem_quotes_the_fields_of_the_api():
    """Fails if a client is told of a field that it cannot send."""
    sampling = Sampling(max_new_tokens=3, min_new_tokens=4)
    refusal = refuse_problems(*sampling.problems(11), names=COMPLETION_NAMES)
    assert str(refusal) == "min_tokens=4 is above max_tokens=3; use at most 3"
