"""A run goes on with the data and the settings it was saved with, or says otherwise."""

import dataclasses
import json
import shutil
import sys

import jax
import numpy as np
import optax
import pytest

from tests.support import small_run, squares
from tests.support.refusals import data_error
from zjax.data import prepare
from zjax.errors import DataError
from zjax.models.build import make_model
from zjax.run import resume as resumes
from zjax.schedule import pacing
from zjax.settings import schema
from zjax.settings.mappings import to_mapping

LOST = (
    "so its samples are not these; restore that setting or that data, or start a new "
    "run"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two steps on the stream `a`; `b` is as long, `c` has other tokens."""
    root = tmp_path_factory.mktemp("saved")
    for name, offset, tokenizer in (
        ("a", 100, "bytes"),
        ("b", 200, "bytes"),
        ("c", 100, "bpe:260"),
    ):
        lines = [json.dumps({"text": str(offset + n)}) for n in range(99)]
        (root / "text.jsonl").write_text("\n".join(lines))
        prepare.prepare(
            [root / "text.jsonl"],
            root / name,
            tokenizer=tokenizer,
            validation_fraction=0.1,
        )
    small_run.fit(root / "run", *token_settings(root / "a"), num_devices=1)
    return root


def token_settings(path, *overrides):
    return (
        "data.source=tokens",
        f"data.path={path}",
        "model.vocab_size=300",
        "num_steps=2",
        *overrides,
    )


def resume(saved, path, *overrides):
    settings = token_settings(path, *overrides)
    return small_run.make_trainer(saved / "run", *settings, num_devices=1)


def settings_told(caplog):
    told = caplog.messages
    return [message for message in told if message.startswith("settings")]


@pytest.mark.parametrize(
    ("path", "overrides", "named"),
    [
        ("b", (), {"data.digest"}),
        ("a", ("data.length=15",), {"data.length"}),
        ("a", ("seed=4",), {"seed"}),
        ("a", ("global_batch_size=8",), {"global_batch_size"}),
        ("a", ("data.packing=documents",), {"data.packing"}),
    ],
)
def test_other_data_is_refused_by_name(saved, path, overrides, named):
    with pytest.raises(DataError) as error:
        resume(saved, saved / path, *overrides)
    assert named <= {problem.field for problem in error.value.problems}
    assert all(str(problem).endswith(LOST) for problem in error.value.problems)


def test_data_of_another_tokenizer_is_refused_by_name(saved):
    with data_error(
        f"data.path={str(saved / 'c')!r} has tokens of 'bpe:260', and the run was "
        "trained on those of 'bytes'; prepare the text with the tokenizer of the run"
    ):
        resume(saved, saved / "c")


def test_the_same_data_elsewhere_is_taken_and_told(saved, tmp_path, caplog):
    shutil.copytree(saved / "a", tmp_path / "moved")
    assert resume(saved, tmp_path / "moved").step == 2
    assert settings_told(caplog) == [
        "settings that differ from step 2:\n"
        f"  data.path: '{saved}/a' -> '{tmp_path}/moved'"
    ]


def test_every_setting_that_differs_is_told_with_both_values(saved, caplog):
    """Fails if another optimizer, model or length of the run is taken in silence."""
    others = (
        "num_steps=3",
        "model.norm_eps=0.1",
        "optimizer.rule.b2=0.99",
        "zero.stage=3",
    )
    resume(saved, saved / "a", *others)
    assert settings_told(caplog) == [
        "settings that differ from step 2:\n"
        "  num_steps: 2 -> 3\n"
        "  zero.stage: 2 -> 3\n"
        "  optimizer.rule.b2: 0.95 -> 0.99\n"
        "  model.norm_eps: 1e-05 -> 0.1"
    ]
    caplog.clear()
    resume(saved, saved / "a")
    assert settings_told(caplog) == []


def test_settings_of_newer_versions_are_counted_at_their_defaults(caplog):
    """Fails if an upgrade lists every setting that the saved version lacked."""
    config = schema.Config(seed=3, num_steps=7)
    old = to_mapping(config)
    for section in ("lora", "buckets", "elasticity"):
        del old[section]
    for name in ("seed", "deterministic"):
        del old[name]
    del old["model"]["query_scale_size"]  # derived from the heads
    resumes.report_changes({"config": old, "jax": jax.__version__}, config, 5)
    assert settings_told(caplog) == [
        "settings that differ from step 5:\n"
        "  seed: absent -> 3\n"
        "  5 settings of newer versions, at their defaults"
    ]


BEFORE = "num_steps=1000", "data.length=1024"
LTD = "random_ltd=span"


@pytest.mark.parametrize(
    ("saved", "other", "lines"),
    [
        ((), (LTD,), ["random_ltd: None -> 'span'"]),
        ((LTD,), (), ["random_ltd: 'span' -> None"]),
        (
            (LTD,),
            (LTD, "random_ltd.pacing.start=256"),
            ["random_ltd.pacing.start: 128 -> 256"],
        ),
        (
            (),
            ("layer_drop.theta=0.5",),
            ["layer_drop: None -> {'theta': 0.5, 'gamma': 0.0}"],
        ),
        (
            ("layer_drop.theta=0.5",),
            ("layer_drop.theta=0.7", "layer_drop.gamma=0.1"),
            ["layer_drop.theta: 0.5 -> 0.7", "layer_drop.gamma: 0.0 -> 0.1"],
        ),
        (
            ("sequence_warmup=window",),
            ("sequence_warmup=window", "sequence_warmup.pacing.num_steps=500"),
            ["sequence_warmup.pacing.num_steps: 1000 -> 500"],
        ),
    ],
)
def test_other_schedules_of_the_same_samples_are_told(caplog, saved, other, lines):
    """As any setting that changes what steps compute, and not what they read."""
    before, after = (small_run.make_config("x", *BEFORE, *x) for x in (saved, other))
    extra = {"config": to_mapping(before), "jax": jax.__version__}
    resumes.report_changes(extra, after, 7)
    head = "settings that differ from step 7:"
    assert settings_told(caplog) == ["\n".join([head, *(f"  {x}" for x in lines)])]


def grow_by_hand(step):
    return 12 + step // 2


@pytest.mark.parametrize(
    ("settings", "numbers", "told"),
    [
        (
            {"optimizer": schema.Optimizer(rule=schema.OnebitAdam())},
            (20, 200),
            ("optimizer.rule.freeze_step", 3, 30),
        ),
        (
            {"layer_drop": schema.LayerDrop(theta=0.5)},
            (100, 200),
            ("layer_drop.gamma", 1.0, 0.5),
        ),
    ],
    ids=["freeze", "layer drop"],
)
def test_what_follows_from_the_number_of_steps_is_told(settings, numbers, told):
    before, after = (schema.Config(num_steps=x, **settings) for x in numbers)
    saved = {"config": to_mapping(before), "jax": jax.__version__}
    assert resumes.changes(saved, after) == [("num_steps", *numbers), told]


OLD_RECORDS = [
    (
        {"communication": {"num_local_steps": 40, "num_fragments": 4, "delay": 5}}
        | {"mesh": {"replica": 2}},
        {"local_steps": schema.LocalSteps(num_steps=40, num_fragments=4, delay=5)},
    ),
    (
        {"zero": {"shard_over_replica": True, "quantized_weights": True}},
        {"replicas": schema.Sharded(quantized_weights=True)},
    ),
    (
        {"zero": {"optimizer_memory": "auto", "parameter_memory": "device"}},
        {"offload": schema.AutoOffload()},
    ),
    ({"zero": {"optimizer_memory": "device", "nvme_paths": []}}, {"offload": None}),
]


@pytest.mark.parametrize(("record", "settings"), OLD_RECORDS)
def test_a_record_of_old_names_resumes_without_differences(record, settings, caplog):
    """Fails if a round that goes on is refused, or a default is told as a change."""
    section = next(iter(record))
    changed = dataclasses.replace(getattr(schema.Config(), section), **settings)
    mesh = schema.Mesh(**record.get("mesh", {}))
    config = dataclasses.replace(schema.Config(mesh=mesh), **{section: changed})
    resumes.check_messages({"config": record}, config, step=42)
    resumes.report_changes({"config": record, "jax": jax.__version__}, config, 42)
    (told,) = caplog.messages
    assert f"  {section}." not in told and "at their defaults" in told


def test_the_function_of_a_schedule_that_was_changed_is_told(caplog, monkeypatch):
    """Its name is the same: fails if its values are not compared."""
    custom = ".pacing.kind=custom", f".pacing.function={__name__}:grow_by_hand"
    settings = ("sequence_warmup=window", "sequence_warmup.pacing.num_steps=8")
    settings += tuple(f"sequence_warmup{x}" for x in custom)
    config = small_run.make_config("x", *settings)
    model, dtype = make_model(config), np.float32
    before = resumes.fingerprint_functions(config, model, compute_dtype=dtype)
    monkeypatch.setattr(sys.modules[__name__], "grow_by_hand", lambda step: 8 + step)
    pacing._call_each.cache_clear()
    after = resumes.fingerprint_functions(config, model, compute_dtype=dtype)
    resumes.report_functions({"functions": before, "jax": jax.__version__}, after)
    told = "sequence_warmup.pacing.function: the computation differs from the saved run"
    assert caplog.messages[-1] == told
    pacing._call_each.cache_clear()


def test_another_jax_is_told():
    config = small_run.make_config("x")
    found = resumes.changes({"config": {}, "jax": "0.1"}, config)
    assert found[-1].setting == "jax"
    assert found[-1].value == "0.1"


def make_columns(directory, num_rows, first=0.0, **given):
    columns = squares.Columns({"x": [first, *np.arange(1.0, num_rows)]})
    return squares.make_trainer(directory, batches=columns, **given)


@pytest.fixture
def columns(tmp_path):
    trainer = make_columns(tmp_path / "run", 20)
    trainer.fit()
    trainer.close()
    return tmp_path / "run"


def test_columns_of_another_number_of_rows_are_refused(columns):
    """Fails if `num_rows` is not compared, where all else is the same."""
    with pytest.raises(DataError) as error:
        make_columns(columns, 21)
    assert f"num_rows=21 was 20 in the saved run, {LOST}" in str(error.value)


def test_columns_of_other_values_are_refused(columns):
    with pytest.raises(DataError) as error:
        make_columns(columns, 20, first=0.5)
    assert [problem.field for problem in error.value.problems] == ["data.digest"]
    assert make_columns(columns, 20).step == 2


def test_a_list_of_other_batches_is_told(tmp_path, caplog):
    """Fails if what was drawn before the step is not compared, or more than that."""

    def draw_next(*numbers):
        batches = [{"x": np.full(8, n, np.float32)} for n in numbers]
        trainer = squares.make_trainer(tmp_path, "num_steps=3", batches=batches)
        caplog.clear()
        next(trainer.loader)
        trainer.close()
        return caplog.messages

    batches = [{"x": np.full(8, n, np.float32)} for n in range(3)]
    squares.make_trainer(tmp_path, batches=batches).fit()
    told = ["batches: the first 2 are not those of the saved run"]
    assert draw_next(0, 5, 2, 3) == told
    assert draw_next(0, 1, 5, 3) == []


def test_another_optimizer_or_loss_of_the_caller_is_told(tmp_path, caplog):
    """Fails if code that no setting names may change in silence."""

    def told(**given):
        caplog.clear()
        squares.make_trainer(tmp_path, **given).close()
        return [
            r.getMessage() for r in caplog.records if "computation" in r.getMessage()
        ]

    trainer = squares.make_trainer(tmp_path, tx=optax.sgd(0.1))
    trainer.fit()
    trainer.close()
    end = "the computation differs from the saved run"
    assert told(tx=optax.sgd(0.1)) == []
    assert told(tx=optax.sgd(0.2)) == [f"tx: {end}"]
    other = {"tx": optax.sgd(0.1), "loss": squares.weighted_loss}
    assert told(**other) == [f"model: {end}"]
