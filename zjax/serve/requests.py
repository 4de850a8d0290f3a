"""Requests of OpenAI's API: how a generator is to write, and how a reply looks."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from zjax.data.conversations import Conversation
from zjax.data.prompts import as_talk
from zjax.errors import DataError
from zjax.generation.sampling import MAX_LOGPROBS, Sampling
from zjax.serve.fields import (
    IDS,
    INTEGER,
    MESSAGES,
    OBJECT,
    PROMPT,
    SWITCH,
    TEXT,
    TEXTS,
    Fields,
    between,
    integers,
)
from zjax.serve.refusals import Refusal, refuse_error

_MAX_INT = (1 << 31) - 1
TOKENS = integers(1, _MAX_INT)
MAX_STOPS = 64
"""Stop strings of a request: each is looked for behind every token."""
DEFAULT = 16
"""Tokens of a completion without `max_tokens`, as in OpenAI's API."""
_COMMON_NAMES = {
    "min_new_tokens": "min_tokens",
    "num_samples": "n",
    "end_ids": "stop_token_ids",
}
COMPLETION_NAMES = _COMMON_NAMES | {
    "max_new_tokens": "max_tokens",
    "num_logprobs": "logprobs",
    "prompt_logprobs": "logprobs",
}
CHAT_NAMES = _COMMON_NAMES | {
    "chat": "messages",
    "input": "messages",
    "max_new_tokens": "max_completion_tokens",
    "num_logprobs": "top_logprobs",
    "prompt": "messages",
}
"""Fields of the API by the names of the generator."""
_COMMON_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "metadata": ({},),
    "store": (False,),
    "user": (),
}
COMPLETION_WITHOUT_EFFECT = _COMMON_WITHOUT_EFFECT | {"best_of": (1,), "suffix": ("",)}
CHAT_WITHOUT_EFFECT = _COMMON_WITHOUT_EFFECT | {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are refused unless the value asks for nothing."""

Prompt = str | Sequence[int] | Conversation


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request that has been read.

    Args:
        prompts: Texts, token ids or a conversation; each has `sampling.num_samples`
            texts.
        sampling: How tokens are chosen, and where texts end.
        is_streamed: Whether tokens are sent one by one.
        has_usage: Whether a stream ends with the numbers of tokens.
        echoes: Whether a text begins with the prompt.
        special_tokens: Whether names of special tokens in a prompt are these tokens.
    """

    prompts: list[Prompt]
    sampling: Sampling
    is_streamed: bool
    has_usage: bool
    echoes: bool = False
    special_tokens: bool = False


def read_completion(
    given: Mapping[str, Any], model: str, end_ids: tuple[int, ...]
) -> Asked:
    """Reads the body of a completion; `end_ids` are the ids that end texts."""
    fields = Fields(given)
    _check_model(fields, model)
    prompt = fields.require("prompt", PROMPT, "")
    stream = _read_stream(fields)
    echoes = fields.take("echo", SWITCH, False)
    num_logprobs = fields.take("logprobs", integers(0, MAX_LOGPROBS))
    num_tokens = fields.take("max_tokens", integers(0, _MAX_INT), DEFAULT)
    if num_tokens == 0 and (num_logprobs is None or not echoes):
        remedy = "ask for 1 or more, or for scores of the prompt by echo and logprobs"
        fields.refuse("max_tokens", 0, "writes nothing", remedy)
    sampling = _read_sampling(
        fields,
        end_ids,
        max_new_tokens=num_tokens,
        num_logprobs=num_logprobs,
        prompt_logprobs=num_logprobs if echoes else None,
    )
    special_tokens = fields.take("special_tokens", SWITCH, False)
    fields.close(COMPLETION_WITHOUT_EFFECT)
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: list[Prompt] = [prompt] if is_one else [*prompt]
    return Asked(prompts, sampling, *stream, echoes, special_tokens)


def read_chat(given: Mapping[str, Any], model: str, end_ids: tuple[int, ...]) -> Asked:
    """Reads the body of a chat completion; `end_ids` are the ids that end texts."""
    fields = Fields(given)
    _check_model(fields, model)
    messages = fields.require("messages", MESSAGES, [])
    stream = _read_stream(fields)
    has_logprobs = fields.take("logprobs", SWITCH, False)
    top = fields.take("top_logprobs", integers(0, MAX_LOGPROBS))
    if top is not None and not has_logprobs:
        fields.refuse("top_logprobs", top, "needs logprobs", "set logprobs to true")
    num_tokens = fields.take("max_completion_tokens", TOKENS)
    older = fields.take("max_tokens", TOKENS)
    if None not in (num_tokens, older):
        remedy = "leave it out"
        fields.refuse("max_tokens", older, "is max_completion_tokens, too", remedy)
    sampling = _read_sampling(
        fields,
        end_ids,
        max_new_tokens=num_tokens or older or 0,  # 0 fills the model
        num_logprobs=(top or 0) if has_logprobs else None,
    )
    options = fields.take("chat_template_kwargs", OBJECT, {})
    fields.close(CHAT_WITHOUT_EFFECT)
    record = {"messages": messages, "chat_template_kwargs": options}
    try:
        talk = as_talk(record)
    except DataError as error:
        raise refuse_error(error, CHAT_NAMES) from None
    return Asked([talk], sampling, *stream)


def _check_model(fields: Fields, model: str) -> None:
    """Refuses the name of a model that is not served."""
    name = fields.take("model", TEXT, model)
    if name != model:
        message = f"model={name[:100]!r} is not served; use {model!r}"
        raise Refusal(404, message, param="model", code="model_not_found")


def _read_stream(fields: Fields) -> tuple[bool, bool]:
    """Reads whether the reply is a stream, and whether it ends with usage."""
    is_streamed = fields.take("stream", SWITCH, False)
    options = fields.take("stream_options", OBJECT)
    if options is None:
        return is_streamed, False
    if not is_streamed:
        remedy = "leave it out, or set stream to true"
        fields.refuse("stream_options", options, "needs a stream", remedy)
    inner = Fields(options, "stream_options.")
    has_usage = inner.take("include_usage", SWITCH, False)
    inner.close({"include_obfuscation": (False,)})
    return is_streamed, has_usage


def _read_sampling(
    fields: Fields, end_ids: tuple[int, ...], *, max_new_tokens: int, **given: Any
) -> Sampling:
    """Reads how tokens are chosen, with the defaults of OpenAI's API."""
    stop = fields.take("stop", TEXTS, [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MAX_STOPS:
        problem, remedy = f"has {len(stop)} texts", f"give at most {MAX_STOPS}"
        fields.refuse("stop", stop, problem, remedy)
    ends = () if fields.take("ignore_eos", SWITCH, False) else end_ids
    asked = fields.take("stop_token_ids", IDS, [])
    # None takes the ids of the tokenizer, which may be more than a request may name.
    is_default = ends == end_ids and not asked
    ends = None if is_default else tuple(dict.fromkeys([*ends, *asked]))
    seed = fields.take("seed", INTEGER, secrets.randbits(32))
    num_samples = fields.take("n", integers(1, _MAX_INT), 1)
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=float(fields.take("temperature", between(0, 2), 1.0)),
        top_k=max(fields.take("top_k", integers(-1, _MAX_INT), 0), 0),
        top_p=float(fields.take("top_p", between(0, 1), 1.0)),
        min_p=float(fields.take("min_p", between(0, 1), 0.0)),
        repetition_penalty=float(
            fields.take("repetition_penalty", between(0.01, 100), 1.0)
        ),
        presence_penalty=float(fields.take("presence_penalty", between(-2, 2), 0.0)),
        frequency_penalty=float(fields.take("frequency_penalty", between(-2, 2), 0.0)),
        min_new_tokens=fields.take("min_tokens", integers(0, _MAX_INT), 0),
        num_samples=num_samples,
        seed=seed & 0xFFFFFFFF,
        end_ids=ends,
        stop=tuple(stop),
        **given,
    )
