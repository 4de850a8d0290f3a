"""Configurations of public projects, beside what DeepSpeed itself computes of them."""

import json
import math
import pathlib

import pytest

from zjax import deepspeed
from zjax.config import load_config
from zjax.settings.batch import resolve_batch

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "deepspeed.json"
CASES = json.loads(GOLDEN.read_text())
"""Made by tests/golden/make_deepspeed.py with DeepSpeed 0.19.8."""
REFUSED = {
    "compression_training",
    "optimizer.params.max_coeff",
    "optimizer.params.min_coeff",
    "zero_optimization.zenflow",
}
RULES = {
    "adam": "adamw",
    "adamw": "adamw",
    "lamb": "lamb",
    "sgd": "sgd",
    "lion": "lion",
}
SCHEDULES = {
    None: "constant",
    "WarmupLR": "warmup_lr",
    "WarmupDecayLR": "warmup_decay_lr",
    "WarmupCosineLR": "warmup_cosine_lr",
}
MEMORIES = {"none": "device", "cpu": "pinned_host", "nvme": "nvme"}


def nested(keys):
    found = {}
    for path, value in keys.items():
        *sections, name = path.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return found


def refused(conversion):
    return {
        next((name for name in REFUSED if problem.field.startswith(name)), str(problem))
        for problem in conversion.problems()
    }


def test_there_are_many_and_most_of_them_convert():
    assert len(CASES) >= 60
    clean = [not refused(deepspeed.convert(nested(x["keys"]))) for x in CASES.values()]
    assert sum(clean) >= 50


@pytest.mark.parametrize("name", CASES)
def test_a_public_configuration_means_what_deepspeed_makes_of_it(name):
    keys, computed = CASES[name]["keys"], CASES[name]["computed"]
    found = deepspeed.convert(nested(keys))
    assert [row.key for row in found.rows if not row.is_default] == [*keys]
    problems = refused(found)
    if "error" in computed:
        assert problems or computed["error"] != "ValidationError"
        return
    assert problems <= REFUSED
    config = load_config({}, found.settings)
    assert config.zero.stage == computed["stage"]
    state, params = (
        MEMORIES[computed[f"{name}_device"]] for name in ("optimizer", "parameter")
    )
    # The state leaves the devices wherever parameters do.
    is_apart = state == "device" != params
    assert config.zero.optimizer_memory == ("pinned_host" if is_apart else state)
    assert config.zero.placement.parameter_memory == params
    if keys.get("gradient_clipping") != "auto":
        assert config.optimizer.clip_norm == (computed["clip"] or math.inf)
    if computed["optimizer"]:
        if computed["optimizer"] in RULES:
            assert config.optimizer.rule.kind == RULES[computed["optimizer"]]
        assert config.optimizer.schedule.kind == SCHEDULES[computed["scheduler"]]
    if "auto" not in (keys.get("bf16.enabled"), keys.get("fp16.enabled")):
        half = "float16" if computed["fp16"] else "float32"
        dtype = "bfloat16" if computed["bf16"] else half
        assert config.precision.compute_dtype == dtype
    if "batch" in computed:
        num_shards = computed["num_devices"] // config.mesh.sequence
        sizes = resolve_batch(config, num_shards)
        theirs = computed["batch"]
        assert sizes.global_batch_size == theirs[0]
        assert (sizes.microbatch_size, sizes.num_microbatches) == tuple(theirs[1:])
