"""Files of DeepSpeed as settings: each key has one verdict, and none is lost."""

import math
import os
import sys

import pytest

from tests.support.command_line import typed
from zjax.cli.data_commands import convert_file, summarise_file
from zjax.config import load_config
from zjax.deepspeed import convert, read_settings, sections
from zjax.deepspeed.reading import leaves, read_text
from zjax.errors import ConfigError

AUTO = """
{"bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr":
"auto", "betas": "auto", "eps": "auto"}}, "scheduler": {"type": "WarmupLR",
"params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}}, "zero_optimization":
{"stage": 3, "overlap_comm": true, "reduce_bucket_size": "auto",
"stage3_param_persistence_threshold": "auto",
"stage3_gather_16bit_weights_on_model_save": true}, "gradient_accumulation_steps":
"auto", "gradient_clipping": "auto", "train_batch_size": "auto",
"train_micro_batch_size_per_gpu": "auto"}
"""
HALF = """
{"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 8, "gradient_clipping":
0.0, "optimizer": {"type": "Adam", "params": {"lr": 0.0004, "adam_w_mode": false}},
"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12}}
"""
HOST = """
{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme",
"nvme_path": "/disk", "ratio": 1.0}, "offload_param": {"device": "cpu",
"pin_memory": true}}, "aio": {"block_size": 262144}, "bf16": {"enabled": true},
"wandb": {"enabled": true, "project": "mine"}}
"""
SAVING = """
{"train_batch_size": 256, "curriculum_learning": {"enabled": true,
"curriculum_type": "seqlen", "min_difficulty": 64, "max_difficulty": 1024,
"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 500,
"difficulty_step": 64}}, "progressive_layer_drop": {"enabled": true, "theta": 0.5,
"gamma": 0.001}, "data_efficiency": {"enabled": true, "data_routing": {"enabled":
true, "random_ltd": {"enabled": true, "total_layer_num": 12, "random_ltd_layer_num":
10, "random_ltd_layer_id": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "model_type": "decoder",
"random_ltd_schedule": {"min_value": 128, "max_value": 1024, "schedule_type":
"fixed_linear", "schedule_config": {"require_steps": 700, "seq_per_step": 128}}}}}}
"""
BITS = """
{"train_batch_size": 64, "optimizer": {"type": "OneBitAdam", "params": {"lr":
0.0002, "freeze_step": 400}}, "scheduler": {"type": "WarmupDecayLR", "params":
{"warmup_num_steps": 100, "total_num_steps": 2000}}}
"""
BIG_BIRD = """
{"train_batch_size": 8, "sparse_attention": {"mode": "bigbird", "block": 16,
"num_random_blocks": 1, "num_sliding_window_blocks": 3, "num_global_blocks": 1}}
"""
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
        "zero.offload": "nvme",
        "zero.offload.parameter_memory": "pinned_host",
        "zero.offload.nvme_paths": ("/disk",),
        "observe.sinks": ("console", "jsonl", "wandb"),
        "observe.project": "mine",
        "optimizer.clip_norm": 1.0,
    },
    {
        "num_microbatches": 1,
        "sequence_warmup": "truncate",
        "sequence_warmup.pacing.num_steps": 500,
        "sequence_warmup.pacing.start": 64,
        "sequence_warmup.pacing.end": 1_024,
        "sequence_warmup.pacing.multiple": 64,
        "random_ltd": "layerwise",
        "random_ltd.pacing.num_steps": 700,
        "random_ltd.pacing.start": 128,
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


@pytest.mark.parametrize(("text", "expected"), [*zip(CASES, EXPECTED, strict=True)])
def test_settings_and_a_verdict_on_each_key(text, expected):
    found = convert(values := read_text(text))
    assert not found.problems()
    assert expected.items() <= found.settings.items()
    given = [row.key for row in found.rows if not row.is_default]
    assert given == [*leaves(values)]
    load_config({}, found.settings)  # settings exist, and have these types
    names = {name for row in found.rows for name in row.note.split("=")[0].split()}
    assert names & found.settings.keys()


def test_auto_leaves_the_run_as_it_is():
    found = convert(read_text(AUTO))
    assert {"global_batch_size", "optimizer.clip_norm"}.isdisjoint(found.settings)
    assert "precision.compute_dtype" not in found.settings
    told = {row.key: row.note for row in found.rows}
    assert told["train_batch_size"] == "as the run has it"


def test_the_config_file_has_the_same_settings(tmp_path):
    found = convert(read_text(HOST))
    path = tmp_path / "ours.py"
    path.write_text(sections.config_file(found))
    assert load_config(path) == load_config({}, found.settings)


def test_problems_of_a_file_are_told_at_once():
    values = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    values |= {"gradient_clipping": "CLIP", "amp": {"enabled": True}}
    assert list(map(str, convert(values).problems())) == [
        "gradient_clipping='CLIP' is not a number; write a number",
        "train_batch_size=None is not given; "
        "give it, or train_micro_batch_size_per_gpu",
        "bf16.enabled=True is on with fp16.enabled; keep one of them",
        "amp='1 keys' is not supported; use bf16.enabled",
    ]
    assert list(map(str, convert({}).problems())) == [
        "train_batch_size=None is not given; give it, or train_micro_batch_size_per_gpu"
    ]


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
        ({"allgather_size": 5e8}, "XLA combines the messages"),
        (
            {"hybrid_engine": {"enabled": True}},
            "zjax rl draws texts with the weights of the run",
        ),
        ({"hybrid_engine": {"inference_tp_size": 2}}, "its section is off"),
        (
            {"aio": {"block_size": 1e6}},
            "requests follow from the disks; see zjax bench --nvme",
        ),
        (
            {"zero_optimization": {"stage3_module_granularity_threshold": -1}},
            "XLA schedules and combines the messages",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1}}},
            "a run begins",
        ),
    ],
)
def test_what_deepspeed_takes_and_zjax_does_not_need_is_no_problem(values, note):
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


def test_generation_on_another_mesh_is_refused():
    values = {"enabled": True, "inference_tp_size": 4}
    found = convert({"train_batch_size": 8, "hybrid_engine": values})
    assert [*map(str, found.problems())] == [
        "hybrid_engine.inference_tp_size=4 is not supported; set mesh.tensor, for "
        "training and generation"
    ]


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
            '{"a":' * 5_000,
            "ds_config='ds' is nested too deep; give a ds_config.json",
        ),
        (
            "{\"a\": '''x'''}",
            "ds_config='ds' is not JSON on line 1 (''' begins no text there); "
            "write the text in double quotes",
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


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{}" + b" " * (1 << 20), "it has more than 1,048,576 bytes"),
        (b"{\xff}", "it is not UTF-8 text"),
    ],
)
def test_what_is_in_a_file_must_be_a_short_text(tmp_path, content, problem):
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_settings(path)
    assert str(error.value) == (
        f"ds_config={str(path)!r} cannot be read ({problem}); "
        "give a ds_config.json, saved as UTF-8"
    )


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
        convert_file(typed("convert"))
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
