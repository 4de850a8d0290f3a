"""Each key of the table has the type, the default and the names of DeepSpeed."""

import ast
import re

import pytest

from zjax.deepspeed import convert
from zjax.deepspeed.sections import TABLE
from zjax.deepspeed.table import If, No, To
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
ABSENT = ("train_micro_batch_size_per_gpu", "data_parallel_size")
ABSENT += ("sequence_parallel_size", "scheduler.params.total_num_steps")
"""Keys whose default stands for a missing key, and is refused where it is written."""


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
            default = key.default if isinstance(key, To | If | No) else key
            if name and type(default) in NAMES:
                yield section, f"{section.path}.{name}".strip("."), default


UNKNOWN = "is not a key of DeepSpeed"
KEYS = {path: (section, default) for section, path, default in keys()}
STRICT = [section.path for section in TABLE if section.is_strict]


def test_the_table_has_the_keys_of_deepspeed():
    assert len(KEYS) > 180
    assert {"fp16", "bf16", "zero_optimization", "compile", "wandb"} <= {*STRICT}


def test_a_batch_size_alone_sets_what_deepspeed_has_by_default():
    assert convert({"train_batch_size": 8}).settings == {
        "global_batch_size": 8,
        "num_microbatches": 1,
        "optimizer.clip_norm": 1.0,
        "precision.compute_dtype": "float32",
        "zero.stage": 0,
        "zero.offload": None,
    }


@pytest.mark.parametrize(
    "path", [path for path in KEYS if path not in CHANGED + ABSENT]
)
def test_a_default_that_is_written_changes_nothing(path):
    found = convert(written(path, KEYS[path][1]))
    others = [f"{path}={KEYS[path][1]} is not a parameter of Adam; leave it out"]
    assert list(map(str, found.problems())) in ([], others)
    assert found.settings == convert(ON).settings


REFUSED = """
gradient_cliping=1.0 is not a key of DeepSpeed; did you mean gradient_clipping?
zero_optimization.stages=2 is not a key of DeepSpeed; did you mean stage?
elastic_checkpoint=True is not a key of the outermost object; it belongs in \
zero_optimization
train_batch_size=-8 is out of range; use 1 or more
train_batch_size=0 is out of range; use 1 or more | \
{'train_micro_batch_size_per_gpu': 2}
gradient_accumulation_steps=0 is out of range; use 1 or more
data_parallel_size=0 is out of range; use 1 or more
tensor_parallel.autotp_size=-2 is out of range; use 0 or more
fp16s.enabled=True is not a key of fp16s; it belongs in fp16 or bf16 or bfloat16
train_batch_size='8.5' is not a whole number; write a whole number
fp16=None is not an object; write an object, or leave it out
zero_optimization.offload_param='cpu' is not an object; write an object, or leave it \
out
checkpoint.tag_validation='FOO' is not a choice; use one of ignore, warn, fail
communication_data_type='FOO' is not a choice; use one of fp32, fp16, bf16
pipeline.stages='two' is no number; use 1 or more, or auto
zero_optimization.reduce_bucket_size=-1 is out of range; use 0 or more
zero_optimization.offload_param.max_in_cpu=-1 is out of range; use 0 or more
zero_optimization.offload_optimizer.ratio=2 is out of range; use 0 to 1
zero_optimization.zero_quantized_weights=True needs to know the nodes; set \
zero_hpz_partition_size to the GPUs of one
fp16.loss_scale_window=0 is out of range; use 1 or more
fp16.loss_scale=-1 is out of range; use 0 for a dynamic scale, or more | \
{'fp16.enabled': False}
fp16.fp16_master_weights_and_grads=True is not supported; use float32 masters | \
{'fp16.loss_scale': 128}
fp16.initial_scale_power=5000 is no power of a float32; use 127 or less
bf16.bf16_master_weights_and_grads=True needs to know bf16.enabled; write \
bf16.enabled as true or false | {'fp16.enabled': 'auto', 'bf16.enabled': 'auto'}
bf16.check_grad_overflow=False needs to know bf16.enabled; write bf16.enabled as true \
or false | {'fp16.enabled': 'auto', 'bf16.enabled': 'auto'}
fp16.consecutive_hysteresis=True needs to know fp16.enabled; write fp16.enabled as \
true or false | {'fp16.enabled': 'auto', 'bf16.enabled': 'auto'}
steps_per_print=2.5 is not a whole number; write a whole number
zero_optimization.offload_optimizer.ratio=0.5 is not supported; use 1.0, or the \
device cpu
train_batch_size=8 is given by elasticity; leave it out, or set \
elasticity.ignore_non_elastic_batch_info | {'elasticity.enabled': True, \
'elasticity.max_train_batch_size': 8, 'elasticity.micro_batch_sizes': [2]}
data_efficiency.data_routing.random_ltd.random_ltd_layer_id=['a', 1] is not \
supported; use 1 to 2: all layers but the first and the last | {'data_efficiency': \
{'enabled': True, 'data_routing': {'enabled': True, 'random_ltd': {'enabled': True, \
'total_layer_num': 4}}}}
data_efficiency.data_routing.random_ltd.random_ltd_layer_id=[1] is not supported; use \
1 to 9999999999998: all layers but the first and the last | {'data_efficiency': \
{'enabled': True, 'data_routing': {'enabled': True, 'random_ltd': {'enabled': True, \
'total_layer_num': 10000000000000}}}}
curriculum_learning.schedule_type='custom' is not supported; use one of \
fixed_linear, fixed_root, fixed_discrete | {'curriculum_learning.enabled': True}
scheduler.params.cycle_min_lr=0.1 has no meaning beside the other keys; leave it out
optimizer.type='Adagrad' is not supported; give an optax optimizer to zjax.initialize \
in its place
optimizer.type='auto' is filled by no run; name one, as AdamW
optimizer.type=None is not given; name one, as AdamW | {'optimizer.params.lr': 0.0001}
optimizer.params.max_grad_norm=5.0 is not supported; write it as gradient_clipping
optimizer.params.amsgrad=True is not supported; leave it out
optimizer.params.max_coeff=10.0 is not a parameter of Adam; leave it out
optimizer.params.max_coeff=0.3 is another limit of the ratios of norms than here; use \
10.0 | {'optimizer.type': 'Lamb'}
optimizer.params.min_coeff=0.1 is another limit of the ratios of norms than here; use \
0.01 | {'optimizer.type': 'Lamb'}
optimizer.params.bias_correction=False is not a parameter of SGD; leave it out | \
{'optimizer.type': 'SGD'}
optimizer.params.bias_correction=False is not a parameter of AdamW; leave it out | \
{'optimizer.type': 'AdamW', 'optimizer.params.torch_adam': True}
scheduler.params.last_batch_iteration=9 is not supported; use -1: a run that resumes \
continues its schedule
scheduler.params.warmup_num_steps=0 is no number of steps; use 1 or more
scheduler.params.warmup_type='cosine' is not supported; use log, which DeepSpeed \
takes in its place, or linear
scheduler.params.cycle_max_lr=None is not given; give it: OneCycle needs it | \
{'scheduler.type': 'OneCycle', 'scheduler.params.cycle_min_lr': 0.1}
scheduler.params.cycle_momentum=True is not supported with onebit_adam; use false | \
{'scheduler.type': 'OneCycle', 'scheduler.params.cycle_min_lr': 0.1, \
'scheduler.params.cycle_max_lr': 1.0, 'optimizer.type': 'OneBitAdam'}
scheduler.params.cycle_momentum=None is on where it is not given; write it as false | \
{'scheduler.type': 'OneCycle', 'scheduler.params.cycle_min_lr': 0.1, \
'scheduler.params.cycle_max_lr': 1.0, 'optimizer.type': 'OneBitAdam'}
scheduler.params.cycle_first_step=3 is not a key of DeepSpeed; did you mean \
cycle_first_step_size? | {'scheduler.type': 'OneCycle', \
'scheduler.params.cycle_min_lr': 0.1, 'scheduler.params.cycle_max_lr': 1.0, \
'optimizer.type': 'OneBitAdam', 'scheduler.params.cycle_momentum': False}
scheduler.params.total_num_steps=None is not given; give it: WarmupDecayLR ends there \
| {'scheduler.type': 'WarmupDecayLR'}
"""
"""Problems, and after a bar keys beside the key at fault."""
MAPPED = """
zero_optimization.offload_optimizer.ratio=0.5 {'zero.offload': 'auto'} | \
{'zero_optimization.offload_optimizer.device': 'cpu'}
zero_optimization=True {'zero.stage': 1}
zero_optimization.offload_param.device='nvme' {'zero.offload': 'pinned_host', \
'zero.offload.parameter_memory': 'nvme'}
zero_optimization.offload_optimizer.device='nvme' {'zero.offload': 'nvme', \
'zero.offload.parameter_memory': 'device'}
zero_optimization.cpu_offload=True {'zero.offload': 'pinned_host', \
'zero.offload.parameter_memory': 'device'}
zero_optimization.cpu_offload_param=True {'zero.offload': 'pinned_host', \
'zero.offload.parameter_memory': 'pinned_host'}
zero_optimization.mics_shard_size=4 {'mesh.replica': -1, 'mesh.data': 4}
zero_optimization.zero_hpz_partition_size=4 {'mesh.replica': -1, \
'mesh.data': 4, 'zero.replicas.secondary_partition': True}
zero_optimization.zero_quantized_gradients=True {'zero.replicas.quantized_gradients': \
True} | {'zero_optimization.zero_hpz_partition_size': 4}
optimizer.params.weight_decay=0.1 {'optimizer.weight_decay': 0.1, \
'optimizer.decay_vectors': True}
optimizer.params.weight_decay='auto' {'optimizer.decay_vectors': True}
optimizer.params.bias_correction=False {'optimizer.rule.bias_correction': False}
optimizer.params.bias_correction=True {'optimizer.rule.bias_correction': False} | \
{'optimizer.type': 'ZeroOneAdam'}
optimizer.type='OneBitLamb' {'optimizer.rule.bias_correction': False, 'mesh.data': 1}
optimizer.type='Adam' {'optimizer.weight_decay': 0.01, 'optimizer.rule': 'adamw'} | \
{'optimizer.params.torch_adam': True}
optimizer.type='Adam' {'optimizer.weight_decay': 0.0, 'optimizer.rule': 'adam'} | \
{'optimizer.params.torch_adam': True, 'optimizer.params.adam_w_mode': False}
optimizer.type='SGD' {'optimizer.rule': 'sgd'} | {'optimizer.params.momentum': 0.9}
optimizer.type='SGD' {'optimizer.rule': 'sgd_l2'} | \
{'optimizer.params.momentum': 0.9, 'optimizer.params.weight_decay': 'auto'}
tensor_parallel.tp.tp_size=2 {'mesh.tensor': 2}
sequence_parallel_size=2 {'mesh.sequence': 2}
pipeline.stages=2 {'mesh.pipeline': 2}
pipeline.activation_checkpoint_interval=1 {'model.remat': 'full'}
expert_parallel.autoep_size=4 {'mesh.expert': 4} | {'expert_parallel.enabled': True}
activation_checkpointing.cpu_checkpointing=True {'model.activation_memory': \
'pinned_host', 'model.remat': 'full'}
steps_per_print=10 {'observe.log_every_steps': 10}
csv_monitor.enabled=True {'observe.sinks': ('console', 'jsonl', 'csv')}
communication_data_type='fp32' {'precision.reduce_dtype': 'float32'}
data_types.grad_accum_dtype='bf16' {'precision.grad_sum_dtype': 'bfloat16'}
torch_autocast.enabled='true' {'precision.compute_dtype': 'bfloat16'}
bf16.check_grad_overflow=False {'precision.on_nonfinite': 'update'} | \
{'fp16.enabled': False, 'bf16.enabled': True}
bf16.bf16_master_weights_and_grads=True {'precision.master_dtype': 'bfloat16'} | \
{'fp16.enabled': False, 'bf16.enabled': True}
bf16.bf16_optimizer_states=True {'optimizer.rule.moment_dtype': 'bfloat16'} | \
{'fp16.enabled': False, 'bf16.enabled': True}
data_efficiency.seed=7 {'seed': 7} | {'data_efficiency.enabled': True}
curriculum_learning.schedule_config.difficulty=[8,16] \
{'sequence_warmup.pacing.values': (8, 16)} | {'curriculum_learning.enabled': True, \
'curriculum_learning.schedule_type': 'fixed_discrete'}
curriculum_learning.schedule_config.max_step=[5] \
{'sequence_warmup.pacing.last_steps': (5,)} | {'curriculum_learning.enabled': True, \
'curriculum_learning.schedule_type': 'fixed_discrete'}
sparse_attention.attention='unidirectional' {'model.kind': 'decoder'}
"""
"""Keys with values, the settings that they become, and after a bar keys beside."""


def rows(table):
    return table.strip().splitlines()


def read_row(row):
    """Key, value, words of a row, and a file with the key."""
    row, _, beside = row.partition(" | ")
    key, words = re.split("(?<!,) ", row, maxsplit=1)
    path, _, value = key.partition("=")
    value = MISSING if "not given" in words else ast.literal_eval(value)
    values = ON
    for name, other in {**ast.literal_eval(beside or "{}"), path: value}.items():
        values = written(name, other, values)
    return row, path, words, values


@pytest.mark.parametrize("row", rows(REFUSED))
def test_what_cannot_be_honoured_is_refused_by_name(row):
    message, _, _, values = read_row(row)
    assert list(map(str, convert(values).problems())) == [message]


@pytest.mark.parametrize("row", rows(MAPPED))
def test_a_key_becomes_settings(row):
    _, path, settings, values = read_row(row)
    found = convert(values)
    assert not found.problems()
    assert ast.literal_eval(settings).items() <= found.settings.items()
    assert {row.key: row.verdict for row in found.rows}[path] in ("mapped", "derived")


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
    what = "is not an object; write an object, or leave it out"
    assert str(problems[0]) == f"{path}=2 {what}"


@pytest.mark.parametrize(
    "key", [x for one in TABLE for x in one.keys.values() if isinstance(x, To)]
)
def test_settings_of_the_table_exist(key):
    assert mappings.type_of(key.setting) is not None
