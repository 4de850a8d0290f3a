"""Each key of the table has the type, the default and the names of DeepSpeed."""

import pytest

from zjax.deepspeed import convert
from zjax.deepspeed.sections import TABLE
from zjax.deepspeed.table import If, To
from zjax.settings import mappings

NAMES = {bool: "true or false", int: "a whole number", float: "a number"}
NAMES |= {str: "a text", list: "a list"}
ON = {
    "train_batch_size": 8,
    "optimizer": {"type": "Adam"},
    "scheduler": {"type": "WarmupLR"},
    "fp16": {"enabled": True},
    "sparse_attention": {"mode": "fixed"},
}
MISSING = object()
CHANGED = ("train_batch_size", "optimizer.type", "scheduler.type", "fp16.enabled")


def written(path, value, base=ON):
    """Keys and values of a file in which one key is written, too."""
    name, _, rest = path.partition(".")
    if value is MISSING and not rest:
        return {key: x for key, x in base.items() if key != name}
    return {**base, name: written(rest, value, base.get(name, {})) if rest else value}


def keys():
    """Section, path and default of each key of a known type."""
    for section in TABLE:
        for name, key in section.keys.items():
            default = key.default if isinstance(key, To | If) else key
            if name and type(default) in NAMES:
                yield section, f"{section.path}.{name}".strip("."), default


UNKNOWN = "is not a key of DeepSpeed"
KEYS = {path: (section, default) for section, path, default in keys()}
STRICT = [section.path for section in TABLE if section.is_strict]


def test_the_table_has_the_keys_of_deepspeed():
    assert len(KEYS) > 180
    assert {"fp16", "bf16", "zero_optimization", "compile", "wandb"} <= {*STRICT}


@pytest.mark.parametrize("path", [path for path in KEYS if path not in CHANGED])
def test_a_default_that_is_written_changes_nothing(path):
    found = convert(written(path, KEYS[path][1]))
    others = [f"{path}={KEYS[path][1]} is not a parameter of Adam; leave it out"]
    assert list(map(str, found.problems())) in ([], others)
    assert found.settings == convert(ON).settings


ZERO, CYCLE = "zero_optimization", "scheduler.params"
ONE_CYCLE = {"scheduler.type": "OneCycle", f"{CYCLE}.cycle_min_lr": 0.1}
BITS = {**ONE_CYCLE, f"{CYCLE}.cycle_max_lr": 1.0, "optimizer.type": "OneBitAdam"}
LAMB = {"optimizer.type": "Lamb"}
OPEN = {"fp16.enabled": "auto", "bf16.enabled": "auto"}
LEFT_OUT = "is not supported; leave it out"
NO_OBJECT = "is not an object; write an object, or leave it out"
REFUSED = [
    ("gradient_cliping", 1.0, f"{UNKNOWN}; did you mean gradient_clipping?"),
    (f"{ZERO}.stages", 2, f"{UNKNOWN}; did you mean stage?"),
    (
        "elastic_checkpoint",
        True,
        f"is not a key of the outermost object; it belongs in {ZERO}",
    ),
    ("train_batch_size", "8.5", "is not a whole number; write a whole number"),
    ("fp16", None, NO_OBJECT),
    (f"{ZERO}.offload_param", "cpu", NO_OBJECT),
    (
        "checkpoint.tag_validation",
        "FOO",
        "is not a choice; use one of ignore, warn, fail",
    ),
    ("communication_data_type", "FOO", "is not a choice; use one of fp32, fp16, bf16"),
    ("pipeline.stages", "two", "is no number; use 1 or more, or auto"),
    (f"{ZERO}.reduce_bucket_size", -1, "is out of range; use 0 or more"),
    (f"{ZERO}.offload_param.max_in_cpu", -1, "is out of range; use 0 or more"),
    (f"{ZERO}.offload_optimizer.ratio", 2, "is out of range; use 0 to 1"),
    (
        f"{ZERO}.zero_quantized_weights",
        True,
        "needs to know the nodes; set zero_hpz_partition_size to the GPUs of one",
    ),
    ("fp16.loss_scale_window", 0, "is out of range; use 1 or more"),
    (
        "fp16.loss_scale",
        -1,
        "is out of range; use 0 for a dynamic scale, or more",
        {"fp16.enabled": False},
    ),
    (
        "fp16.fp16_master_weights_and_grads",
        True,
        "is not supported; use float32 masters",
        {"fp16.loss_scale": 128},
    ),
    ("fp16.initial_scale_power", 5_000, "is no power of a float32; use 127 or less"),
    *(
        (
            f"{section}.{key}",
            value,
            f"needs to know {section}.enabled; "
            f"write {section}.enabled as true or false",
            OPEN,
        )
        for section, key, value in (
            ("bf16", "bf16_master_weights_and_grads", True),
            ("bf16", "check_grad_overflow", False),
            ("fp16", "consecutive_hysteresis", True),
        )
    ),
    (
        "optimizer.type",
        "Adagrad",
        "is not supported; give an optax optimizer to zjax.initialize in its place",
    ),
    ("optimizer.type", "auto", "is filled by no run; name one, as AdamW"),
    (
        "optimizer.type",
        MISSING,
        "is not given; name one, as AdamW",
        {"optimizer.params.lr": 1e-4},
    ),
    ("optimizer.params.amsgrad", True, LEFT_OUT),
    ("optimizer.params.max_coeff", 10.0, "is not a parameter of Adam; leave it out"),
    *(
        (
            f"optimizer.params.{key}",
            value,
            f"is another limit of the ratios of norms than here; use {limit}",
            LAMB,
        )
        for key, value, limit in (("max_coeff", 0.3, 10.0), ("min_coeff", 0.1, 0.01))
    ),
    (f"{CYCLE}.warmup_num_steps", 0, "is no number of steps; use 1 or more"),
    (
        f"{CYCLE}.warmup_type",
        "cosine",
        "is not supported; use log, which DeepSpeed takes in its place, or linear",
    ),
    (
        f"{CYCLE}.cycle_max_lr",
        MISSING,
        "is not given; give it: OneCycle needs it",
        ONE_CYCLE,
    ),
    (
        f"{CYCLE}.cycle_momentum",
        True,
        "is not supported with onebit_adam; use false",
        BITS,
    ),
    (
        f"{CYCLE}.cycle_momentum",
        MISSING,
        "is on where it is not given; write it as false",
        BITS,
    ),
    (
        f"{CYCLE}.cycle_first_step",
        3,
        f"{UNKNOWN}; did you mean cycle_first_step_size?",
        {**BITS, f"{CYCLE}.cycle_momentum": False},
    ),
    (
        f"{CYCLE}.total_num_steps",
        MISSING,
        "is not given; give it: WarmupDecayLR ends there",
        {"scheduler.type": "WarmupDecayLR"},
    ),
]
"""Key, value, problem with remedy, and keys beside it."""


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused[0])
def test_what_cannot_be_honoured_is_refused_by_name(refused):
    path, value, words, *beside = refused
    values = ON
    for key, other in {**(beside[0] if beside else {}), path: value}.items():
        values = written(key, other, values)
    shown = None if value is MISSING else value
    assert list(map(str, convert(values).problems())) == [f"{path}={shown!r} {words}"]


@pytest.mark.parametrize("path", [x for x in KEYS if KEYS[x][0].is_strict])
def test_a_value_of_another_type_is_refused_also_where_the_section_is_off(path):
    name = NAMES[type(KEYS[path][1])]
    value = 7 if name in ("a text", "a list", "true or false") else "x"
    (problem,) = convert(written(path, value)).problems()
    assert str(problem) == f"{path}={value!r} is not {name}; write {name}"


@pytest.mark.parametrize("path", STRICT)
def test_a_name_that_deepspeed_does_not_have_is_refused(path):
    (problem,) = convert(written(f"{path}.xyzzy", 1)).problems()
    assert str(problem) == (f"{path}.xyzzy=1 is not a key of DeepSpeed; leave it out")


@pytest.mark.parametrize("path", [x.path for x in TABLE if x.path and not x.instead])
def test_a_number_in_place_of_a_section_is_refused(path):
    problems = convert(written(path, 2)).problems()
    assert str(problems[0]) == f"{path}=2 {NO_OBJECT}"


@pytest.mark.parametrize(
    "key", [x for one in TABLE for x in one.keys.values() if isinstance(x, To)]
)
def test_settings_of_the_table_exist(key):
    assert mappings.type_of(key.setting) is not None
