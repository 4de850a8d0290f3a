"""Passes that compile no more than a test asks for cannot choose as if they did."""

import dataclasses

from tests.support import asked, language
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling

MODEL = language.make_language_model(dataclasses.replace(language.GPT, num_layers=1))
GREEDY = Sampling(max_new_tokens=3)
DRAWS = Sampling(max_new_tokens=3, temperature=1.0, seed=3, num_logprobs=0)
PENALTIES = Sampling(max_new_tokens=3, presence_penalty=1.0, frequency_penalty=1.0)


def write(sampling):
    with Generator(MODEL, max_rows=1) as generator:
        [text] = generator.generate([[4, 4, 2]], sampling)
    return text.ids, [*text.logprobs] if text.logprobs else None


def test_tests_share_no_program_that_lacks_what_others_ask_for():
    drawn, penalised = write(DRAWS), write(PENALTIES)
    with asked.compiling(asked.BEST):
        greedy = write(GREEDY)
        assert write(DRAWS)[0] == [0, 0, 0]
    with asked.compiling(asked.DRAWS):
        assert write(DRAWS) == drawn
        assert write(PENALTIES) != penalised
    assert [write(x) for x in (GREEDY, DRAWS, PENALTIES)] == [greedy, drawn, penalised]
