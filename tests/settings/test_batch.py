"""The batch triad, and batch sizes that many numbers of devices divide."""

import itertools
import json
import pathlib

import pytest

from tests.support.refusals import config_error
from zjax.config import check_config, load_config
from zjax.deepspeed import convert
from zjax.errors import ConfigError
from zjax.settings import batch, schema
from zjax.settings.batch import elastic_batch, resolve_batch
from zjax.settings.schema import Elasticity


def resolve(whole, count, size, num_shards=8):
    config = schema.Config(
        global_batch_size=whole, num_microbatches=count, microbatch_size=size
    )
    sizes = batch.resolve_batch(config, num_shards)
    return sizes.global_batch_size, sizes.num_microbatches, sizes.microbatch_size


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((64, 0, 0), (64, 1, 8)),
        ((0, 0, 4), (32, 1, 4)),
        ((64, 2, 0), (64, 2, 4)),
        ((64, 0, 4), (64, 2, 4)),
        ((0, 2, 4), (64, 2, 4)),
        ((64, 2, 4), (64, 2, 4)),
    ],
)
def test_two_give_the_third(given, expected):
    assert resolve(*given) == expected


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_sizes_always_multiply_to_the_batch(num_shards):
    accepted = 0
    for given in itertools.product(range(0, 25, 4), range(3), range(3)):
        try:
            whole, count, size = resolve(*given, num_shards)
        except ConfigError:
            continue
        accepted += 1
        assert whole == count * size * num_shards
        assert min(whole, count, size) > 0
        asked = zip(given, (whole, count, size), strict=True)
        assert all(want in (0, got) for want, got in asked)
    assert accepted


GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "elasticity.json"
CASES = json.loads(GOLDEN.read_text())
"""Made by tests/golden/make_elasticity.py with DeepSpeed 0.19.6."""
LIMITS = sorted({case["elasticity"]["max_train_batch_size"] for case in CASES})
DEVICES = (1, 2, 3, 8, 12, 20, 64, 100)
MIXED = {"enabled": True, "max_train_batch_size": 10_000, "version": 0.1}
MIXED |= {"micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1_500}


def settings(elasticity):
    found = convert({"elasticity": elasticity})
    assert not found.problems()
    return load_config({}, found.settings)


def sizes_or_error(config, number):
    try:
        sizes = resolve_batch(config, number)
    except ConfigError as error:
        assert error.problems[0].field.startswith("elasticity.")
        return None
    assert sizes.global_batch_size == (
        number * sizes.num_microbatches * sizes.microbatch_size
    )
    return [sizes.global_batch_size, sizes.microbatch_size]


@pytest.mark.parametrize(
    "limit", sorted({c["elasticity"]["max_train_batch_size"] for c in CASES})
)
def test_sizes_are_those_of_deepspeed(limit):
    """DeepSpeed also computes batches of 0, and TypeErrors, which are refused here."""
    compared = 0
    for case in CASES:
        if case["elasticity"]["max_train_batch_size"] != limit:
            continue
        config = settings(case["elasticity"])
        for number, theirs in zip(DEVICES, case["computed"], strict=True):
            if theirs == "TypeError":
                continue
            wanted = None if isinstance(theirs, str) or not theirs[0] else theirs
            assert not wanted or wanted[0] <= limit
            assert sizes_or_error(config, number) == wanted, (case, number)
            compared += 1
    assert compared > 400


def test_a_common_multiple_above_the_limit_is_no_batch():
    small = Elasticity(microbatch_sizes=(1, 2, 3, 4), max_batch_size=4)
    assert elastic_batch(small, num_shards=4) == (4, 1)


def test_a_batch_that_23_numbers_of_devices_divide():
    config = settings(MIXED)
    fitting = [n for n in range(1, 1_501) if sizes_or_error(config, n)]
    assert len(fitting) == 23
    assert elastic_batch(config.elasticity, fitting[0])[0] == 9_792


def test_devices_that_do_not_fit_are_refused_before_anything_is_compiled():
    with config_error(
        "elasticity.microbatch_sizes=(8, 12, 16, 17) makes batches of 6720, which 11 "
        "shards do not divide; use 1, 2, 3, 4, 5, 6, 7, 8 batch shards"
    ):
        check_config(settings(MIXED | {"min_gpus": 1, "max_gpus": 8}), num_devices=11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"microbatch_sizes": ()},
            "elasticity.microbatch_sizes=() names no size; name some",
        ),
        (
            {"microbatch_sizes": (2, 0)},
            "elasticity.microbatch_sizes=(2, 0) has one below 1; use 1 or more",
        ),
        (
            {"microbatch_sizes": (9_973, 9_967)},
            "elasticity.microbatch_sizes=(9973, 9967) has a common multiple of "
            "99400891, above 16777216; use sizes that share factors",
        ),
        (
            {"microbatch_sizes": (2, 6), "shards_per_node": 8, "max_batch_size": 47},
            "elasticity.max_batch_size=47 is below 48, of the largest microbatches of "
            "a node; use 48 or more",
        ),
        (
            {"microbatch_sizes": (2,), "min_shards": 5, "max_shards": 4},
            "elasticity.max_shards=4 is below elasticity.min_shards=5; use 5 or more",
        ),
        (
            {"microbatch_sizes": (2,), "max_batch_size": 8, "shards_per_node": 1},
            "elasticity.microbatch_sizes=(2,) has no batch up to 8 for 64 shards; "
            "use a larger elasticity.max_batch_size",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(changes, message):
    with config_error(message):
        elastic_batch(Elasticity(**changes), num_shards=64)


def test_other_batch_sizes_must_agree():
    config = load_config(settings(MIXED), "global_batch_size=32")
    with config_error(
        "global_batch_size=32 is not the 9792 of elasticity on 36 shards; use 0"
    ):
        resolve_batch(config, 36)
    config = load_config(config, "global_batch_size=9792", "microbatch_size=17")
    assert resolve_batch(config, 36).num_microbatches == 16


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"train_batch_size": 8, "elasticity": MIXED},
            "train_batch_size=8 is given by elasticity; leave it out, or set "
            "elasticity.ignore_non_elastic_batch_info",
        ),
        (
            {"elasticity": MIXED | {"version": 0.3, "model_parallel_size": 2}},
            "elasticity.version=0.3 is not supported; use 0.1 or 0.2\n"
            "elasticity.model_parallel_size=2 is not supported; use 1, or give "
            "train_batch_size in place of elasticity",
        ),
        (
            {"elasticity": {"enabled": True, "micro_batch_sizes": [2.5]}},
            "elasticity.micro_batch_sizes=[2.5] is not a list; write whole numbers "
            "above 0, as [2, 4]\n"
            "elasticity.max_train_batch_size=None is not given; give it",
        ),
        (
            {"elasticity": MIXED | {"prefer_large_batch": True}},
            "elasticity.prefer_large_batch=True is not a key of DeepSpeed; "
            "did you mean prefer_larger_batch?",
        ),
    ],
)
def test_keys_of_deepspeed_that_cannot_be_honoured(values, message):
    assert "\n".join(map(str, convert(values).problems())) == message


def test_other_sizes_are_left_out_where_the_file_says_so():
    ignoring = MIXED | {"ignore_non_elastic_batch_info": True}
    found = convert({"train_batch_size": 8, "elasticity": ignoring})
    assert not found.problems()
    assert found.settings["global_batch_size"] == 0
    assert found.rows[0].note == "elasticity gives it"
