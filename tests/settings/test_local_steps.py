"""Local steps fit the other settings, or are refused by name."""

import pytest

from zjax.config import check_config, load_config
from zjax.errors import ConfigError

ROUND = "communication.num_local_steps=10"
REPLICAS = "mesh.replica=2"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(
            [ROUND],
            "communication.num_local_steps=10 has no effect with mesh.replica=1; use "
            "mesh.replica=2 or more, or 0",
            id="one-replica",
        ),
        pytest.param(
            [REPLICAS, "communication.num_local_steps=2000"],
            "communication.num_local_steps=2000 is more than num_steps=1000: nothing "
            "is exchanged; use at most 1000",
            id="longer-than-the-run",
        ),
        pytest.param(
            [REPLICAS, ROUND, "communication.num_synchronous_steps=1000"],
            "communication.num_synchronous_steps=1000 leaves no local step in "
            "num_steps=1000; use at most 990, or communication.num_local_steps=0",
            id="no-local-step",
        ),
        pytest.param(
            [
                REPLICAS,
                "communication.num_local_steps=2000",
                "communication.num_synchronous_steps=1000",
            ],
            "communication.num_local_steps=2000 is more than num_steps=1000: nothing "
            "is exchanged; use at most 1000",
            id="no-local-step-and-longer-than-the-run",
        ),
        pytest.param(
            [REPLICAS, ROUND, "communication.num_synchronous_steps=995"],
            "communication.num_local_steps=10 is more than num_steps=1000 after "
            "num_synchronous_steps=995: nothing is exchanged; use at most 5",
            id="longer-than-what-is-left",
        ),
        pytest.param(
            [REPLICAS, ROUND, "communication.num_synchronous_steps=25"],
            "communication.num_local_steps=10 leaves the last 5 of num_steps=1000 "
            "after num_synchronous_steps=25 unmerged; use a divisor of num_steps - "
            "num_synchronous_steps",
            id="no-divisor-of-what-is-left",
        ),
        pytest.param(
            [REPLICAS, "communication.num_local_steps=30"],
            "communication.num_local_steps=30 leaves the last 10 of num_steps=1000 "
            "unmerged; use a divisor of num_steps",
            id="no-divisor",
        ),
        pytest.param(
            [REPLICAS, ROUND, "communication.num_fragments=20"],
            "communication.num_fragments=20 is more than "
            "communication.num_local_steps=10; use at most 10",
            id="too-many-fragments",
        ),
        pytest.param(
            [REPLICAS, ROUND, "communication.num_fragments=3", "communication.delay=3"],
            "communication.delay=3 is not less than the 3 steps between two merges; "
            "use at most 2",
            id="delay-beyond-the-round",
        ),
        pytest.param(
            [REPLICAS, ROUND, "zero.memory=pinned_host"],
            "communication.num_local_steps=10 is not built for "
            "zero.optimizer_memory='pinned_host'; use zero.optimizer_memory=device, "
            "or 0",
            id="offload",
        ),
        pytest.param(
            [REPLICAS, ROUND, "precision.master_dtype=bfloat16"],
            "communication.num_local_steps=10 is not built for "
            "precision.master_dtype='bfloat16'; use precision.master_dtype=float32, "
            "or 0",
            id="small-weights",
        ),
        pytest.param(
            [REPLICAS, ROUND, "zero.stage=3", "zero.shard_over_replica=true"],
            "communication.num_local_steps=10 is not built for "
            "zero.shard_over_replica=True; use zero.shard_over_replica=False, or 0",
            id="one-copy-of-the-model",
        ),
        pytest.param(
            [REPLICAS, ROUND, "optimizer.ema_decay=0.9"],
            "communication.num_local_steps=10 is not built for "
            "optimizer.ema_decay=0.9; use optimizer.ema_decay=0.0, or 0",
            id="averages",
        ),
        pytest.param(
            [REPLICAS, ROUND, "optimizer.rule=onebit_adam"],
            "communication.num_local_steps=10 leaves optimizer.rule='onebit_adam' "
            "nothing to send; use another rule, or 0",
            id="onebit-adam",
        ),
        pytest.param(
            [REPLICAS, ROUND, "optimizer.rule=onebit_lamb"],
            "communication.num_local_steps=10 leaves optimizer.rule='onebit_lamb' "
            "nothing to send; use another rule, or 0",
            id="onebit-lamb",
        ),
        pytest.param(
            ["communication.delay=1", "communication.outer_momentum=0.5"],
            "communication.outer_momentum=0.5 has no effect with "
            "communication.num_local_steps=0; leave it at 0.9, or set "
            "communication.num_local_steps\n"
            "communication.delay=1 has no effect with communication.num_local_steps=0; "
            "leave it at 0, or set communication.num_local_steps",
            id="settings-of-local-steps",
        ),
    ],
)
def test_what_does_not_fit_is_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        check_config(load_config({}, *overrides), 8)
    assert str(error.value) == message
