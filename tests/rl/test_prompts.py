"""Prompts of files and rows: what is no prompt is refused by record, before a run."""

import pytest

from tests.support.refusals import config_error, data_error
from zjax.data.prompts import make_prompts
from zjax.rl.prompts import PromptSet, read_rows
from zjax.settings import schema

GIVE_ONE = "give one of them"
GIVE_TEXT = "give a text, or a conversation as 'messages'"
GIVE_LIST = 'write [{"role": "user", "content": "..."}]'
GIVE_JSON = "name the field otherwise, or make it JSON"
REFUSALS = {
    "{'text': 'a'}": ("has 0 of 'prompt' and 'messages'", GIVE_ONE),
    "{'prompt': 'a', 'messages': []}": (
        "has 2 of 'prompt' and 'messages'",
        GIVE_ONE,
    ),
    "{'prompt': ''}": ("has no text as 'prompt'", GIVE_TEXT),
    "{'prompt': 5}": ("has no text as 'prompt'", GIVE_TEXT),
    "{'prompt': [1, 2, 999999]}": ("has no text as 'prompt'", GIVE_TEXT),
    "{'prompt': {'messages': [{}]}}": ("has no text as 'prompt'", GIVE_TEXT),
    "{'messages': 'hi'}": ("has no list as 'messages'", GIVE_LIST),
    "{'messages': [1, -2]}": ("has no list as 'messages'", GIVE_LIST),
    "{'prompt': 'a', 'x': float('nan')}": (
        "has a number that is not finite",
        GIVE_JSON,
    ),
    "{'prompt': 'a', 'x': {1}}": (
        "has a value that is no JSON (Object of type set is not JSON serializable)",
        GIVE_JSON,
    ),
    "{'prompt': 'a', 'completion': 'b'}": (
        "has the field 'completion', an argument of rewards",
        GIVE_JSON,
    ),
}


def make(rows):
    data = schema.Data(source="standard_library")
    prompts = make_prompts(data, 257)
    return PromptSet("rl.prompts", rows, prompts, most=10, seed=None)


@pytest.mark.parametrize("row", REFUSALS)
def test_what_is_no_prompt_is_refused_by_record(row):
    value, (problem, remedy) = eval(row), REFUSALS[row]
    shown = repr(str(value)[:40])
    with data_error(f"rl.prompts={shown} {problem} in record 2; {remedy}"):
        make([{"prompt": "a"}, value])


def test_what_cannot_be_encoded_is_refused_by_record():
    text = "rl.prompts='\\ud800' has half a character (a lone surrogate) in record 2; "
    with data_error(text + "remove it"):
        make([{"prompt": "a"}, {"prompt": "\ud800"}])


def test_conversations_need_a_template():
    text = "rl.prompts='messages' has no chat template: the tokenizer of the data is "
    text += "'bytes'; set data.path to data that `zjax data prepare --chat` made"
    with config_error(text):
        make([{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])


def test_fields_beside_a_prompt_may_be_null():
    prompts = make([{"prompt": "ab", "messages": None, "x": None}])
    assert (prompts.at(0).given, prompts.at(0).row) == ("ab", {"x": None})


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n{"prompt": "b"}\n \n\n')
    assert read_rows("rl.prompts", str(path)) == [{"prompt": "a"}, {"prompt": "b"}]


def test_lines_that_are_no_json_are_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    text = f"rl.prompts='{path}' is no JSON in line 3 (Expecting value); give "
    text += "JSON Lines with 'prompt' or 'messages' in each"
    with data_error(text):
        read_rows("rl.prompts", str(path))
