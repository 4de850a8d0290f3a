"""The gap between sampler and trainer is 0 on a mesh, in what RL itself reads."""

import numpy as np

from tests.support import features
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling
from zjax.rl.policy import logprobs_of

TEMPERATURE, NUM_NEW = 0.8, 9


def test_the_gap_is_zero_on_split_weights_and_microbatches():
    """Fails if a device's share of rows or weights changes a bit of a token."""
    config = features.config_of(
        "precision.batch_invariant=true zero.stage=3 data.length=16 num_microbatches=2 "
        "model.num_layers=1"
    )
    run = features.start(config)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7, 9, 3]]
    sampling = Sampling(
        max_new_tokens=NUM_NEW,
        temperature=TEMPERATURE,
        num_logprobs=0,
        filtered_logprobs=True,
        end_ids=(),
    )
    with Generator(run, run.state, max_rows=1, max_length=16) as generator:
        written = generator.generate(prompts, sampling)
    batch = features.make_batch(config, 0)
    shape = batch["tokens"].shape
    tokens, ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    targets = np.full(shape, -100, np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, written, strict=True)):
        whole = [*prompt, *text.ids]
        tokens[row, : len(whole)], ids[row, : len(whole)] = whole, 1
        targets[row, len(prompt) - 1 : len(whole) - 1] = text.ids
    given = {"tokens": tokens, "segment_ids": ids, "targets": targets}
    found = np.asarray(logprobs_of(run, run.state, given, temperature=TEMPERATURE))
    for row, text in enumerate(written):
        own = np.float32(text.logprobs)
        np.testing.assert_array_equal(found[row][targets[row] >= 0], own)
