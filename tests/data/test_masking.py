"""Masked tokens of an encoder are those of an oracle, by seed, step and row alone."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.refusals import config_error, data_error
from zjax.config import check_config, load_config
from zjax.data import draws as sampler
from zjax.data import evaluation, loader, masking, source
from zjax.errors import ConfigError

SMALL = {
    "seed": 3,
    "global_batch_size": 8,
    "model": {"kind": "encoder", "vocab_size": 100, "max_length": 12},
    "data": {"source": "synthetic", "masking": {"mask_id": 7}},
}


def shardings_of(num_devices):
    devices = np.array(jax.devices()[:num_devices])
    mesh = jax.sharding.Mesh(devices, ("data",))
    return lambda leaf: NamedSharding(mesh, P("data"))


def take(config, num_devices, first, number):
    with loader.make_loader(
        config, shardings_of(num_devices), start_step=first
    ) as read:
        return [jax.tree.map(np.asarray, next(read)) for _ in range(number)]


def oracle(text, seed, step, row, fraction, mask_id, num_ids, kept):
    """Masks a row token by token, with the numbers of its generator."""
    generator = np.random.default_rng([0x4D4C4D, seed, step, row])
    draws, fates = generator.random(len(text)), generator.random(len(text))
    others = generator.integers(num_ids, size=len(text))
    read, weights = [], []
    for place, token in enumerate(text.tolist()):
        is_chosen = draws[place] < fraction and token not in kept
        weights.append(float(is_chosen))
        if is_chosen and fates[place] < 0.8:
            token = mask_id
        elif is_chosen and fates[place] >= 0.9:
            token = int(others[place])
        read.append(token)
    return read, weights


@pytest.mark.parametrize("packing", ["blocks", "documents"])
def test_batches_are_those_of_the_oracle_on_any_mesh_and_after_a_resume(packing):
    """Fails if masks depend on devices or on where a run began, or padding is one."""
    config = load_config(SMALL, {"data.packing": packing, "data.masking.fraction": 0.4})
    batches = take(config, 4, 0, 3)
    np.testing.assert_equal(take(config, 2, 2, 1), batches[2:])
    rows, with_weight = source.open_rows(config, "train"), 0
    with loader.make_loader(config, shardings_of(1)) as read:
        assert read.state()["data.masking"] == [0.4, 7]
    order = sampler.Sampler(3, len(rows), 8)
    for step, batch in enumerate(batches):
        indices = order.indices(step)
        texts = rows.read(indices)
        assert (batch["targets"] == texts["tokens"]).all()
        for place, row in enumerate(indices.tolist()):
            text = texts["tokens"][place]
            tokens, weights = oracle(text, 3, step, row, 0.4, 7, 100, (99, 7))
            real = texts.get("segment_ids", np.ones_like(texts["tokens"]))[place] > 0
            assert batch["tokens"][place].tolist() == tokens
            assert batch["weights"][place].tolist() == (weights * real).tolist()
            with_weight += sum(weights)
    assert with_weight > 50


def test_shares_are_80_10_and_10_percent_and_each_step_hides_others():
    rule = masking.Rule(0, 0.15, mask_id=1_000, num_ids=1_000, kept_ids=(0,))
    text = np.arange(100_000, dtype=np.int32) % 1_000
    tokens, chosen = rule.apply(text, 4, 2)
    hidden, kept = tokens == 1_000, chosen & (tokens == text)
    assert abs(chosen.mean() - 0.15) < 0.005
    assert abs(hidden[chosen].mean() - 0.8) < 0.01
    assert abs(kept[chosen].mean() - 0.1) < 0.01
    assert (tokens == text)[~chosen].all() and not chosen[text == 0].any()
    again = [rule.apply(text, *place)[1] for place in ((4, 2), (5, 2), (4, 3))]
    assert [(x == chosen).all() for x in again] == [True, False, False]


def test_every_evaluation_has_the_same_masks():
    config = load_config(SMALL, {"evaluation.num_batches": 1})
    data = evaluation.find_evaluation(config, shardings_of(2))
    seen = []
    for _ in range(2):
        with data.open_batches() as batches:
            seen.append([np.asarray(filled.batch["tokens"]) for filled in batches])
    np.testing.assert_equal(*seen)
    assert (seen[0][0] == 7).any()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data.source": "standard_library", "model.vocab_size": 300}, 257),
        ({"data.source": "standard_library", "data.masking.mask_id": 9}, 9),
    ],
)
def test_token_that_hides_others(changes, expected):
    config = load_config({"model": {"kind": "encoder"}}, changes)
    rule = masking.make_rule(config.data, config.model.vocab_size, 0)
    assert (rule.mask_id, rule.num_ids) == (expected, 257)
    assert set(rule.kept_ids) == {256, expected}


def test_no_token_that_hides_others_is_refused():
    config = load_config({"model": {"kind": "encoder"}})
    with data_error(
        "data.masking.mask_id=-1 finds no [MASK] or <mask> in the tokenizer, nor an id "
        "of the model beyond the 257 of the tokenizer; set the id of a token that "
        "hides others, or model.vocab_size=258"
    ):
        masking.make_rule(config.data, config.model.vocab_size, 0)


def test_settings_that_mask_nothing_are_refused():
    changes = {"data.masking": {"fraction": 0.3, "mask_id": 5}}
    with config_error(
        "data.masking.fraction=0.3 has no effect with model.kind='decoder'; leave it "
        "at 0.15, or set model.kind to 'encoder'\n"
        "data.masking.mask_id=5 has no effect with model.kind='decoder'; leave it at "
        "-1, or set model.kind to 'encoder'"
    ):
        check_config(load_config(changes), 8)
    changes = {"model.kind": "encoder", "buckets": "cut"}
    changes |= {"data.masking.mask_id": 60_000, "model.vocab_size": 300}
    with pytest.raises(ConfigError) as error:
        check_config(load_config(changes), 8)
    told = str(error.value).splitlines()
    assert (
        "data.masking.mask_id=60000 is not below model.vocab_size=300; use at most 299"
        in told
    )
    assert (
        "buckets='cut' is not built for the masked tokens of "
        "model.kind='encoder'; leave it out" in told
    )
