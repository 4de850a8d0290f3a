"""Files of DeepSpeed as settings: each key has one verdict, and none is lost."""

import math
import os
import sys

import pytest

from zjax.cli.data_commands import convert_file, summarise_file
from zjax.config import load_config
from zjax.deepspeed import convert, read_settings, report
from zjax.deepspeed.reading import leaves, read_text
from zjax.errors import ConfigError

AUTO = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
"""Filled by the run, as of a trainer."""
HALF = {
    "train_batch_size": 4_096,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Adam", "params": {"lr": 4e-4, "adam_w_mode": False}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12},
}
HOST = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "ratio": 1.0},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "aio": {"block_size": 262_144},
    "bf16": {"enabled": True},
    "wandb": {"enabled": True, "project": "mine"},
}
SAVING = {
    "train_batch_size": 256,
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 64,
        "max_difficulty": 1_024,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 500, "difficulty_step": 64},
    },
    "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
    "data_efficiency": {
        "enabled": True,
        "data_routing": {
            "enabled": True,
            "random_ltd": {
                "enabled": True,
                "total_layer_num": 12,
                "random_ltd_layer_num": 10,
                "random_ltd_layer_id": [*range(1, 11)],
                "model_type": "decoder",
                "random_ltd_schedule": {
                    "min_value": 128,
                    "max_value": 1_024,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"require_steps": 700, "seq_per_step": 128},
                },
            },
        },
    },
}
BITS = {
    "train_batch_size": 64,
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 2e-4, "freeze_step": 400}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 2_000},
    },
}
BIG_BIRD = {
    "train_batch_size": 8,
    "sparse_attention": {
        "mode": "bigbird",
        "block": 16,
        "num_random_blocks": 1,
        "num_sliding_window_blocks": 3,
        "num_global_blocks": 1,
    },
}
CASES = [AUTO, HALF, HOST, SAVING, BITS, BIG_BIRD]
EXPECTED = [
    {"zero.stage": 3, "optimizer.rule": "adamw", "optimizer.schedule": "warmup_lr"},
    {
        "global_batch_size": 4_096,
        "microbatch_size": 8,
        "optimizer.rule": "adam",
        "optimizer.clip_norm": math.inf,
        "optimizer.rule.b2": 0.999,
        "optimizer.weight_decay": 0.0,
        "optimizer.schedule.num_warmup_steps": 0,
        "precision.compute_dtype": "float16",
        "precision.loss_scale.initial": 4_096.0,
        "zero.stage": 0,
    },
    {
        "global_batch_size": 0,
        "num_microbatches": 4,
        "zero.optimizer_memory": "nvme",
        "zero.parameter_memory": "pinned_host",
        "zero.nvme_paths": ("/disk",),
        "observe.sinks": ("console", "jsonl", "wandb"),
        "observe.project": "mine",
        "optimizer.clip_norm": 1.0,
    },
    {
        "num_microbatches": 1,
        "sequence_warmup": "truncate",
        "sequence_warmup.pacing.num_steps": 500,
        "random_ltd": "layerwise",
        "random_ltd.pacing.num_steps": 700,
        "layer_drop.theta": 0.5,
        "precision.compute_dtype": "float32",
    },
    {
        "optimizer.rule": "onebit_adam",
        "optimizer.rule.freeze_step": 400,
        "optimizer.rule.bias_correction": False,
        "mesh.replica": -1,
        "num_steps": 2_000,
        "optimizer.schedule.warmup": "log",
        "optimizer.peak_learning_rate": 1e-3,
        "optimizer.schedule": "warmup_decay_lr",
    },
    {"model.attention": "sparse", "model.kind": "encoder", "model.attention.block": 16},
]


@pytest.mark.parametrize(("values", "expected"), [*zip(CASES, EXPECTED, strict=True)])
def test_settings_and_a_verdict_on_each_key(values, expected):
    found = convert(values)
    assert not found.problems()
    assert expected.items() <= found.settings.items()
    given = [row.key for row in found.rows if not row.is_default]
    assert given == [*leaves(values)]
    load_config({}, found.settings)  # settings exist, and have these types
    names = {name for row in found.rows for name in row.note.split("=")[0].split()}
    assert names & found.settings.keys()


def test_auto_leaves_the_run_as_it_is():
    found = convert(AUTO)
    assert {"global_batch_size", "optimizer.clip_norm"}.isdisjoint(found.settings)
    assert "precision.compute_dtype" not in found.settings
    told = {row.key: row.note for row in found.rows}
    assert told["train_batch_size"] == "as the run has it"


def test_the_config_file_has_the_same_settings(tmp_path):
    found = convert(HOST)
    path = tmp_path / "ours.py"
    path.write_text(report.config_file(found))
    assert load_config(path) == load_config({}, found.settings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param(
            {"train_batch_size": 8, "gradient_cliping": 1.0},
            "gradient_cliping=1.0 is not a key of DeepSpeed; "
            "did you mean gradient_clipping?",
            id="misspelt",
        ),
        pytest.param(
            {"train_batch_size": "BATCH", "zero_optimization": {"stages": 2}},
            "train_batch_size='BATCH' is not a whole number; write a whole number\n"
            "zero_optimization.stages=2 is not a key of DeepSpeed; "
            "did you mean stage?",
            id="template-and-unknown-inside",
        ),
        pytest.param(
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "train_batch_size=None is not given; "
            "give it, or train_micro_batch_size_per_gpu\n"
            "bf16.enabled=True is on with fp16.enabled; keep one of them",
            id="two-dtypes-no-batch",
        ),
        pytest.param(
            {"train_batch_size": 8, "compression_training": {"a": {"enabled": True}}},
            "compression_training='1 keys' is not supported; leave it out",
            id="section",
        ),
        pytest.param(
            {"train_batch_size": 8, "optimizer": {"type": "Adagrad"}},
            "optimizer.type='Adagrad' is not supported; "
            "give an optax optimizer to zjax.initialize in its place",
            id="optimizer",
        ),
        pytest.param(
            {
                "train_batch_size": 8,
                "optimizer": {"type": "Adam", "params": {"amsgrad": True}},
            },
            "optimizer.params.amsgrad=True is not supported; leave it out",
            id="switch-of-an-optimizer",
        ),
        pytest.param(
            {
                "train_batch_size": 8,
                "fp16": {
                    "enabled": True,
                    "loss_scale": 128,
                    "fp16_master_weights_and_grads": True,
                },
            },
            "fp16.fp16_master_weights_and_grads=True is not supported; "
            "use float32 masters",
            id="masters-in-half-with-a-fixed-scale",
        ),
        pytest.param(
            {"train_batch_size": 8, "scheduler": {"type": "WarmupCosineLR"}},
            "scheduler.params.total_num_steps=None is not given; "
            "give it: WarmupCosineLR ends there",
            id="schedule-without-end",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(values, message):
    assert "\n".join(map(str, convert(values).problems())) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"fp16": {"enabled": True, "min_loss_scale": 0.5}},
            "fp16.min_loss_scale=0.5 is not a whole number; write a whole number",
        ),
        (
            {"fp16": {"enabled": True, "loss_scale_window": 0, "min_loss_scale": 0}},
            "fp16.loss_scale_window=0 is out of range; use 1 or more\n"
            "fp16.min_loss_scale=0 is out of range; use 1 or more",
        ),
        (
            {"fp16": {"loss_scale": -1}},
            "fp16.loss_scale=-1 is out of range; use 0 for a dynamic scale, or more",
        ),
        (
            {"fp16": {"enabled": False, "loss_scal": 0}},
            "fp16.loss_scal=0 is not a key of DeepSpeed; did you mean loss_scale?",
        ),
        (
            {"compile": {"backend": "inductor"}},
            "compile.backend='inductor' is not a key of DeepSpeed; leave it out",
        ),
        (
            {"checkpoint": {"tag_validation": "FOO"}},
            "checkpoint.tag_validation='FOO' is not a choice; "
            "use one of ignore, warn, fail",
        ),
        (
            {"communication_data_type": "FOO"},
            "communication_data_type='FOO' is not a choice; "
            "use one of fp32, fp16, bf16",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "large"}},
            "zero_optimization.reduce_bucket_size='large' is not a whole number; "
            "write a whole number",
        ),
        (
            {
                "zero_optimization": {
                    "reduce_bucket_size": -1,
                    "stage3_module_granularity_threshold": -1,
                    "offload_optimizer": {"device": "cpu", "ratio": 2},
                    "offload_param": {"device": "cpu", "max_in_cpu": -1},
                }
            },
            "zero_optimization.reduce_bucket_size=-1 is out of range; use 0 or more\n"
            "zero_optimization.offload_optimizer.ratio=2 is out of range; "
            "use 0 to 1\n"
            "zero_optimization.offload_param.max_in_cpu=-1 is out of range; "
            "use 0 or more",
        ),
        (
            {"pipeline": {"stages": "two"}},
            "pipeline.stages='two' is no number; use 1 or more, or auto",
        ),
        (
            {"elastic_checkpoint": True},
            "elastic_checkpoint=True is not a key of the outermost object; "
            "it belongs in zero_optimization",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"max_in_cpu": 4}}},
            "zero_optimization.offload_optimizer.max_in_cpu=4 is not a key of "
            "zero_optimization.offload_optimizer; "
            "it belongs in zero_optimization.offload_param",
        ),
    ],
)
def test_what_deepspeed_refuses_or_reads_elsewhere_is_refused(values, message):
    problems = convert({"train_batch_size": 8} | values).problems()
    assert "\n".join(map(str, problems)) == message


OBJECT = "is not an object; write an object, or leave it out"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fp16": None}, f"fp16=None {OBJECT}"),
        ({"fp16": True}, f"fp16=True {OBJECT}"),
        ({"optimizer": "Adam"}, f"optimizer='Adam' {OBJECT}"),
        ({"scheduler": [1]}, f"scheduler=[1] {OBJECT}"),
        ({"zero_optimization": 2}, f"zero_optimization=2 {OBJECT}"),
        (
            {"zero_optimization": {"offload_param": "cpu"}},
            f"zero_optimization.offload_param='cpu' {OBJECT}",
        ),
        (
            {"optimizer": {"params": {"lr": 1e-4}}},
            "optimizer.type=None is not given; name one, as AdamW",
        ),
        (
            {"optimizer": {"type": "auto"}},
            "optimizer.type='auto' is filled by no run; name one, as AdamW",
        ),
        (
            {"scheduler": {"params": {"warmup_num_steps": 5}}},
            "scheduler.type=None is not given; name one, as WarmupLR",
        ),
        (
            {"train_batch_size": "8.5"},
            "train_batch_size='8.5' is not a whole number; write a whole number",
        ),
        (
            {"steps_per_print": "often"},
            "steps_per_print='often' is not a number; write a number",
        ),
    ],
)
def test_values_of_another_kind_are_named_as_such(values, message):
    problems = convert({"train_batch_size": 8} | values).problems()
    assert list(map(str, problems)) == [message]


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (
            {"zero_optimization": {"offload_param": "auto"}},
            "DeepSpeed drops 'auto' there: nothing is offloaded",
        ),
        ({"zero_optimization": {"offload_param": None}}, "nothing is offloaded"),
        ({"optimizer": {"type": "Adam", "params": None}}, "it is empty"),
        ({"bf16": None}, "it is off"),
        (
            {"steps_per_print": math.inf},
            "it never prints; metrics are as the run says",
        ),
    ],
)
def test_nothing_where_deepspeed_takes_it_is_no_problem(values, note):
    found = convert({"train_batch_size": 8} | values)
    assert not found.problems()
    assert note in [row.note for row in found.rows]


@pytest.mark.parametrize("values", [[1], None, "ds.json"])
def test_only_keys_and_values_are_read(values):
    with pytest.raises(ConfigError) as error:
        convert(values)
    assert str(error.value) == (
        f"ds_config={values!r} is a {type(values).__name__}; "
        "give the keys and values of a ds_config.json"
    )


def test_sections_that_are_off_and_unknown_ones_need_nothing():
    values = {"train_batch_size": 8, "amp": {"enabled": False}, "my_notes": "x"}
    values |= {"comet": {"samples_log_interval": 5}}  # off where nothing turns it on
    found = convert(values)
    assert not found.problems()
    assert [row.verdict for row in found.rows if row.key == "my_notes"] == [
        "not needed"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ds_config='ds' does not begin with '{'; keep the object alone"),
        (
            "cat <<EOT > ds.json\n{}\nEOT",
            "ds_config='ds' does not begin with '{'; keep the object alone",
        ),
        (
            '{"a": 1, "b": {"c": 1, "c": 2}}',
            "ds_config='ds' has more than one c; keep one of them",
        ),
        (
            '{"a": 1,\n # b: None,\n "c": {"d": "x: y,", "e": False},\n "f": 2}',
            "ds_config='ds' is not JSON on line 3 (False is no value); write false",
        ),
        (
            '{"a": $BATCH, "b": 2}',
            "ds_config='ds' is not JSON on line 1 ($BATCH is no value); "
            "write it in quotes",
        ),
        (
            '{"a": 1',
            "ds_config='ds' is not JSON on line 1 (Bad key name (eof)); "
            "correct it there",
        ),
    ],
)
def test_texts_that_are_not_a_ds_config(text, message):
    with pytest.raises(ConfigError) as error:
        read_text(text, "ds")
    assert str(error.value) == message


@pytest.mark.parametrize("number", ["-1e999", "9" * 5_000])
def test_numbers_too_large_to_be_read(number):
    with pytest.raises(ConfigError) as error:
        read_text(f'{{"a": {number}}}', "ds")
    text = "ds_config='ds' holds a number that is too large ("
    assert str(error.value).startswith(text)
    (problem,) = convert({"train_batch_size": 10**400}).problems()
    assert str(problem).endswith("is not a whole number; write a whole number")


def test_comments_and_trailing_commas_are_read():
    text = '// whole\n{"zero_optimization": {"stage": 2,}, # part\n "a": 5e8,}'
    assert read_text(text) == {"zero_optimization": {"stage": 2}, "a": 500_000_000}


def test_autotuning_is_a_command_of_its_own():
    values = {"train_batch_size": 8, "autotuning": {"enabled": True, "fast": False}}
    found = convert(values)
    assert not found.problems()
    assert [(row.verdict, row.note) for row in found.rows[1:3]] == [
        ("derived", "zjax tune --ds_config=FILE tries what it would try")
    ] * 2


def test_a_file_must_be_there(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_settings(tmp_path / "none.json")
    os.mkfifo(tmp_path / "pipe.json")  # nothing ever writes into it
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_settings(tmp_path / "pipe.json")


def test_a_run_tells_how_many_keys_became_what(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "gradient_clipping": "auto"}')
    told = summarise_file(str(path))
    assert told == f"{path}: 1 mapped, 1 derived; each key: zjax convert {path}"


def test_convert_prints_a_config_file_and_on_stderr_a_table(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "amp": {"enabled": true}}')
    monkeypatch.setattr(sys, "argv", ["zjax", "convert", str(path)])
    with pytest.raises(SystemExit) as end:
        convert_file()
    printed = capsys.readouterr()
    assert end.value.code == 1
    assert "amp.enabled" not in printed.err  # its section is named once
    assert "not supported   use bf16.enabled" in printed.err
    assert printed.err.endswith(
        "1 mapped, 1 not supported\n"
        "zjax: amp='1 keys' is not supported; use bf16.enabled\n"
    )
    ours = tmp_path / "config.py"  # as of zjax convert ds.json > config.py
    ours.write_text(printed.out)
    assert load_config(ours).global_batch_size == 8
