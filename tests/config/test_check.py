"""Every rule about settings, with the exact words that a user reads."""

import dataclasses

import pytest

from tests.support.refusals import case, refusal
from zjax import config as zconfig
from zjax.config.check import check_config
from zjax.errors import ConfigError
from zjax.settings import schema

MESH = [
    case(
        "mesh.tensor=3",
        "mesh.tensor=3 does not divide 8 devices; use 1, 2, 4 or 8",
        id="axis-does-not-divide",
    ),
    case(
        "mesh.data=16",
        "mesh.data=16 does not divide 8 devices; use 1, 2, 4 or 8",
        id="more-than-there-are",
    ),
    case(
        "mesh.data=2",
        "mesh.data=2 makes a mesh of size 2 for 8 devices; use 8 or -1",
        id="idle-devices",
    ),
    case(
        "mesh.data=1",
        "mesh.data=1 makes a mesh of size 1 for 8 devices; use 8 or -1",
        id="one-device-of-many",
    ),
    case(
        "mesh.data=8;mesh.tensor=4",
        "mesh.data=8 makes a mesh of size 32 for 8 devices; use 2 or -1",
        id="product-too-large",
    ),
    case(
        "mesh.replica=4;mesh.tensor=4",
        "mesh.replica=4 needs a multiple of 16 devices, and there are 8; use 1 or 2",
        id="no-room-for-the-rest",
    ),
    case(
        "mesh.replica=-1",
        "mesh.data=-1 takes the remaining devices, as does mesh.replica=-1; keep -1 "
        "for one of them",
        id="two-rests",
    ),
    case(
        "mesh.data=0",
        "mesh.data=0 is out of range; use 1 or more, or -1 for the rest",
        id="axis-of-zero",
    ),
    case(
        "mesh.pipeline=2;mesh.expert=2",
        "mesh.expert=2 splits experts, and model.moe=None has none; use 1, or set "
        "model.moe.num_experts",
        id="expert",
    ),
    case(
        "mesh.expert=-1;mesh.data=1",
        "mesh.expert=-1 splits experts, and model.moe=None has none; use 1, or set "
        "model.moe.num_experts",
        id="expert-as-the-rest",
    ),
]

BATCH = [
    case(
        "global_batch_size=30",
        "global_batch_size=30 does not divide by 8 batch shards x "
        "num_microbatches=1; use a multiple of 8",
        id="batch-over-shares",
    ),
    case(
        "microbatch_size=3",
        "global_batch_size=32 does not divide by 8 batch shards x "
        "microbatch_size=3; use a multiple of 24",
        id="batch-over-microbatch",
    ),
    case(
        "num_microbatches=2;microbatch_size=4",
        "global_batch_size=32 is not num_microbatches=2 x microbatch_size=4 x "
        "8 batch shards; use 64, or 0 to derive it",
        id="triad-disagrees",
    ),
    case(
        "global_batch_size=0;num_microbatches=4",
        "global_batch_size=0 gives no batch size, nor does microbatch_size=0; "
        "set global_batch_size or microbatch_size",
        id="batch-open",
    ),
    case(
        "precision.grad_sum_dtype=bfloat16",
        "precision.grad_sum_dtype='bfloat16' has no effect with one microbatch; "
        "use float32, or more microbatches",
        id="sum-of-one",
    ),
]

TRAINING = [
    case(
        "precision.compute_dtype=float16;precision.loss_scale.minimum=131072",
        "precision.loss_scale.minimum=131072.0 is above "
        "precision.loss_scale.initial=65536.0; use at most 65536.0",
        id="loss-scale-minimum",
    ),
    case(
        "precision.compute_dtype=float16;precision.loss_scale.initial=1000",
        "precision.loss_scale.initial=1000.0 is out of range; "
        "use a power of two, such as 65536.0",
        id="loss-scale-power-of-two",
    ),
    case(
        "precision.compute_dtype=float16;precision.master_dtype=bfloat16",
        "precision.master_dtype='bfloat16' is less precise than "
        "precision.compute_dtype='float16'; use float32",
        id="float16-on-bfloat16",
    ),
    case(
        "precision.compute_dtype=float16;precision.matmul_dtype=float8",
        "precision.matmul_dtype='float8' cannot run with "
        "precision.compute_dtype='float16'; use 'compute', or compute in bfloat16",
        id="float8-with-float16",
    ),
    case(
        "precision.compute_dtype=float16;precision.on_nonfinite=update",
        "precision.on_nonfinite='update' cannot run with "
        "precision.compute_dtype='float16': its loss scale is found by skipping; "
        "use 'skip' or 'stop', or compute in bfloat16",
        id="float16-never-skipping",
    ),
    case(
        "num_steps=110;optimizer.schedule=wsd;optimizer.schedule.num_warmup_steps=100",
        "optimizer.schedule.num_warmup_steps=100 overlaps "
        "optimizer.schedule.decay_fraction=0.2 "
        "of 110 steps; use at most 88",
        id="warmup-overlaps-decay",
    ),
    case(
        "optimizer.groups=[{'pattern': '('}]",
        "optimizer.groups[0].pattern='(' is not a regular expression: missing ), "
        "unterminated subpattern at position 0; correct it, or escape characters "
        "with \\",
        id="group-pattern",
    ),
    case(
        "optimizer.groups=[{'pattern': 'x'}, {}, {'pattern': 'x'}]",
        "optimizer.groups[2].pattern='x' never matches after optimizer.groups[0]; "
        "remove one",
        id="group-twice",
    ),
    case(
        "optimizer.groups=[{'learning_rate_scale': 0, 'weight_decay': 0.5}]",
        "optimizer.groups[0].weight_decay=0.5 has no effect on parameters that are "
        "frozen; leave it at -1.0, or a learning_rate_scale above 0",
        id="decay-of-frozen",
    ),
    case(
        "checkpoint.init_from=w.safetensors;checkpoint.resume=required",
        "checkpoint.init_from='w.safetensors' has no effect with "
        "checkpoint.resume='required'; leave one of them out",
        id="start-and-resume",
    ),
    case(
        "checkpoint.init_from=w.safetensors;checkpoint.expert_noise=0.1",
        "checkpoint.expert_noise=0.1 has no effect with model.moe=None; leave "
        "it at 0.0",
        id="noise-without-experts",
    ),
    case(
        "distill.weight=0.5;distill.memory=pinned_host",
        "distill.teacher='' names no teacher; give the directory of a run",
        id="distillation-without-teacher",
    ),
    case(
        "distill.teacher=runs/large;distill.fraction=0.0001",
        "distill.fraction=0.0001 is no step of num_steps=1000; use more",
        id="distillation-of-no-step",
    ),
    case(
        "observe.sinks=['csv', 'console', 'csv']",
        "observe.sinks=('csv', 'console', 'csv') names csv 2 times; name it once",
        id="sink-twice",
    ),
    case(
        "observe.profile.start_step=1001",
        "observe.profile.start_step=1001 is beyond num_steps=1000; use at most 1000",
        id="profile-after-the-end",
    ),
]

PROCESSES = [
    case(
        "processes.coordinator=node0",
        "processes.coordinator='node0' is not an address; "
        "use host:port, auto or none\n"
        "processes.num_processes=0 gives no number of processes to meet at node0; use "
        "1 or more",
        id="no-port",
    ),
    case(
        "processes.coordinator=node0:99;processes.num_processes=2",
        "processes.process_id=-1 is not one of 2 processes; use 0 to 1",
        id="no-process-id",
    ),
    case(
        "processes.num_processes=2;processes.process_id=0",
        "processes.num_processes=2 has no effect with processes.coordinator='auto'; "
        "leave it at 0, or set processes.coordinator\n"
        "processes.process_id=0 has no effect with processes.coordinator='auto'; "
        "leave it at -1, or set processes.coordinator",
        id="numbers-without-coordinator",
    ),
    case(
        "processes.coordinator=none;processes.heartbeat_seconds=9",
        "processes.heartbeat_seconds=9 has no effect with "
        "processes.coordinator='none'; leave it at 20, or set processes.coordinator",
        id="heartbeat-alone",
    ),
]

MODEL = [
    case(
        "model.num_heads=7;model.num_kv_heads=7",
        "model.num_heads=7 does not divide model.embed_size=768; use a divisor of 768, "
        "or set model.head_size",
        id="heads-over-width",
    ),
    case(
        "model.head_size=63;model.positions=rotary",
        "model.head_size=63 is odd, which rotary positions cannot use; make it even",
        id="odd-rotary-head-size",
    ),
    case(
        "model.num_kv_heads=5",
        "model.num_kv_heads=5 does not divide model.num_heads=12; "
        "use 1, 2, 3, 4, 6 or 12",
        id="kv-heads-over-heads",
    ),
    case(
        "model.embed_size=36;model.positions=rotary",
        "model.num_heads=12 gives heads of odd size 3, which rotary positions cannot "
        "use; "
        "use a divisor of 36 that leaves an even size",
        id="odd-rotary-heads",
    ),
    case(
        "mesh.tensor=8;model.attention=sparse",
        "mesh.tensor=8 does not divide model.num_heads=12, as "
        "model.attention='sparse' needs; use 1, 2 or 4",
        id="tensor-over-sparse-heads",
    ),
    case(
        "mesh.tensor=8;model.num_heads=24;model.num_kv_heads=3;model.attention=sparse",
        "mesh.tensor=8 does not divide model.num_kv_heads=3 of 24 heads, as "
        "model.attention='sparse' needs; use 1",
        id="tensor-over-groups-of-sparse-heads",
    ),
    case(
        "mesh.tensor=-1;mesh.data=1;model.attention=sparse",
        "mesh.tensor=-1 comes out as 8 and does not divide model.num_heads=12, as "
        "model.attention='sparse' needs; use 1, 2 or 4",
        id="tensor-as-the-rest",
    ),
    case(
        "model.layers_per_scan=5;zero.offload=pinned_host;model.remat=full",
        "model.layers_per_scan=5 has no effect with zero.offload='pinned_host'"
        ", which runs blocks one by one; use 0",
        id="loop-over-blocks-that-move",
    ),
    case(
        "model.layers_per_scan=5",
        "model.layers_per_scan=5 does not divide model.num_layers=12; "
        "use 1, 2, 3, 4, 6 or 12",
        id="scan-blocks",
    ),
    case(
        "deterministic=true;model.layers_per_scan=2",
        "model.layers_per_scan=2 repeats a cuDNN kernel that cannot run with "
        "deterministic=True; use 0 or 1, or model.attention=xla",
        id="deterministic-blocks",
    ),
    case(
        "model.attention=cudnn;precision.compute_dtype=float32",
        "model.attention='cudnn' cannot run with precision.compute_dtype='float32'; "
        "use xla, or compute in bfloat16 or float16",
        id="cudnn-in-float32",
    ),
    case(
        "data.source=tokens",
        "data.path='' is missing for data.source='tokens'; "
        "give the directory that `zjax data prepare` made",
        id="tokens-without-path",
    ),
    case(
        "data.length=2048",
        "data.length=2048 exceeds model.max_length=1024; use at most 1024",
        id="longer-than-the-model",
    ),
    case(
        "model.vocab_size=256",
        "model.vocab_size=256 is below the 257 tokens of "
        "data.source='standard_library'; use 257 or more",
        id="bytes-beyond-vocabulary",
    ),
]

RULES = [*MESH, *BATCH, *TRAINING, *PROCESSES, *MODEL]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), RULES)
def test_rule(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message


def test_data_that_is_not_read_is_not_checked():
    """Fails if batches of a smaller vocabulary are held to the default data."""
    config = zconfig.load_config({"model.vocab_size": 51, "data.source": "tokens"})
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, source="standard_library")
    )
    with pytest.raises(ConfigError, match="below the 257 tokens"):
        check_config(config, 1)
    check_config(config, 1, user_batches=True)
    tokens = dataclasses.replace(config.data, source="tokens")
    check_config(dataclasses.replace(config, data=tokens), 1, user_batches=True)


def test_problems_are_reported_together():
    overrides = ["mesh.tensor=3", "zero.min_shard_elements=-1", "data.length=2048"]
    assert refusal(overrides, 8) == (
        "zero.min_shard_elements=-1 is out of range; use 0 or more\n"
        "mesh.tensor=3 does not divide 8 devices; use 1, 2, 4 or 8\n"
        "data.length=2048 exceeds model.max_length=1024; use at most 1024"
    )


@pytest.mark.parametrize(
    ("overrides", "num_devices"),
    [
        pytest.param([], 8, id="defaults"),
        pytest.param([], 1, id="one-device"),
        pytest.param(["mesh.replica=2", "zero.stage=0"], 8, id="replica-at-stage-0"),
        pytest.param(["mesh.tensor=4", "model.vocab_size=50257"], 8, id="tensor"),
        pytest.param(["mesh.tensor=8", "model.mlp_size=100"], 8, id="tensor-uneven"),
        pytest.param(
            ["mesh.tensor=8", "model.num_heads=24", "model.num_kv_heads=4"],
            8,
            id="tensor-copies-kv-heads",
        ),
        pytest.param(["optimizer.clip_norm=inf"], 8, id="no-clipping"),
        pytest.param(["optimizer.weight_decay=0"], 8, id="no-decay"),
        pytest.param(["model.kind=encoder", "model.positions=rotary"], 8, id="encoder"),
        pytest.param(
            ["precision.compute_dtype=float16", "precision.loss_scale.window=0"],
            8,
            id="fixed-loss-scale",
        ),
        pytest.param(
            [
                "processes.coordinator=[::1]:99",
                "processes.num_processes=2",
                "processes.process_id=1",
            ],
            8,
            id="explicit-processes",
        ),
        pytest.param(["global_batch_size=1024"], 1024, id="many-devices"),
        pytest.param(["observe.profile.start_step=1000"], 8, id="profile-last-step"),
        pytest.param(
            ["num_steps=10", "optimizer.schedule.num_warmup_steps=10"],
            8,
            id="all-warmup",
        ),
    ],
)
def test_what_works_is_let_through(overrides, num_devices):
    config = zconfig.load_config({}, *overrides)
    zconfig.check_config(config, num_devices)


def test_own_model_is_not_held_to_the_built_in_one():
    config = zconfig.load_config({}, "data.length=4096")
    zconfig.check_config(config, 8, user_model=True)
    with pytest.raises(ConfigError):
        zconfig.check_config(config, 8)


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        pytest.param(
            schema.Processes(coordinator="node0"),
            "processes.coordinator='node0' is not an address; "
            "use host:port, auto or none\n"
            "processes.num_processes=0 gives no number of processes to meet at node0; "
            "use 1 or more",
            id="no-port",
        ),
        pytest.param(
            schema.Processes(coordinator="node0:99", num_processes=2, process_id=2),
            "processes.process_id=2 is not one of 2 processes; use 0 to 1",
            id="process-beyond-the-last",
        ),
        pytest.param(
            schema.Processes(coordinator="node0", heartbeat_seconds=0),
            "processes.heartbeat_seconds=0 is out of range; use 1 or more",
            id="out-of-range",
        ),
    ],
)
def test_processes_are_checked_before_devices_are_known(processes, message):
    with pytest.raises(ConfigError) as error:
        zconfig.check_processes(schema.Config(processes=processes))
    assert str(error.value) == message


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param(schema.Processes(), id="auto"),
        pytest.param(schema.Processes(coordinator="none"), id="alone"),
        pytest.param(
            schema.Processes(coordinator="[::1]:99", num_processes=2, process_id=1),
            id="address",
        ),
    ],
)
def test_processes_that_can_meet_are_let_through(processes):
    """Whatever the rest says: that is for `check_config`."""
    zconfig.check_processes(schema.Config(num_steps=0, processes=processes))
