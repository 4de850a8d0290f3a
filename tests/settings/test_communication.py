"""What replicas send each other fits the other settings, or is refused by name."""

import pytest

from zjax.config import check_config, load_config
from zjax.errors import ConfigError

ONEBIT = "optimizer.rule=onebit_adam"
ZERO_ONE = "optimizer.rule=zero_one_adam"
REPLICAS = "mesh.replica=2"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(
            ["communication.codec=int8"],
            "communication.codec='int8' has no effect with mesh.replica=1; use "
            "mesh.replica=2 or more, or 'none'",
            id="one-replica",
        ),
        pytest.param(
            [ONEBIT],
            "optimizer.rule='onebit_adam' has no effect with mesh.replica=1; use "
            "mesh.replica=2 or more, or another rule",
            id="one-replica-of-onebit-adam",
        ),
        pytest.param(
            ["communication.codec=int4", REPLICAS, "zero.memory=pinned_host"],
            "communication.codec='int4' is not built for "
            "zero.optimizer_memory='pinned_host'; keep the state on the devices, or "
            "use 'none'",
            id="offload",
        ),
        pytest.param(
            [ONEBIT, REPLICAS, "optimizer.rule.freeze_step=1000"],
            "optimizer.rule.freeze_step=1000 leaves none of num_steps=1000 to send "
            "less; "
            "use at most 999",
            id="freeze-step-beyond-the-run",
        ),
        pytest.param(
            [ONEBIT, REPLICAS, "num_steps=1", "optimizer.schedule.num_warmup_steps=0"],
            "num_steps=1 leaves no step to send less with "
            "optimizer.rule='onebit_adam'; use 2 or more",
            id="one-step",
        ),
        *(
            pytest.param(
                [f"optimizer.rule={name}", REPLICAS, f"communication.codec={codec}"],
                f"communication.codec={codec!r} does not send the warm-up in full with "
                f"optimizer.rule={name!r}; use 'bfloat16' or 'none'",
                id=f"{codec}-in-the-warm-up-of-{name}",
            )
            for name, codec in (
                ("onebit_adam", "int8"),
                ("onebit_lamb", "onebit"),
                ("zero_one_adam", "top_k"),
            )
        ),
        pytest.param(
            [ONEBIT, REPLICAS, "optimizer.rule.moment_dtype=int8"],
            "optimizer.rule.moment_dtype='int8' has no effect with "
            "optimizer.rule='onebit_adam'; leave it out, or set optimizer.rule to "
            "'adamw' or 'adam' or 'lamb' or 'lion' or 'sgd' or 'sgd_l2' or 'muon'",
            id="small-moments",
        ),
        pytest.param(
            [ONEBIT, REPLICAS, "precision.master_dtype=bfloat16"],
            "precision.master_dtype='bfloat16' is not built with "
            "optimizer.rule='onebit_adam'; use 'float32'",
            id="small-weights",
        ),
        pytest.param(
            ["optimizer.rule.freeze_step=5"],
            "optimizer.rule.freeze_step=5 has no effect with optimizer.rule='adamw'; "
            "leave it out, or set optimizer.rule to 'onebit_adam' or 'onebit_lamb' "
            "or 'zero_one_adam'",
            id="freeze-step-of-adamw",
        ),
        pytest.param(
            [ZERO_ONE],
            "optimizer.rule='zero_one_adam' has no effect with mesh.replica=1; use "
            "mesh.replica=2 or more, or another rule",
            id="one-replica-of-zero-one-adam",
        ),
        pytest.param(
            [ZERO_ONE, REPLICAS, "optimizer.rule.freeze_step=1000"],
            "optimizer.rule.freeze_step=1000 leaves none of num_steps=1000 to send "
            "less; "
            "use at most 999",
            id="no-local-step",
        ),
        pytest.param(
            [ZERO_ONE, REPLICAS, "optimizer.ema_decay=0.9"],
            "optimizer.ema_decay=0.9 is not built with "
            "optimizer.rule='zero_one_adam'; leave it at 0.0",
            id="averages-of-zero-one-adam",
        ),
        pytest.param(
            [
                *(ZERO_ONE, REPLICAS, "model.moe.num_experts=4"),
                *("model.moe.top_k=2", "model.moe.bias_rate=0.01"),
            ],
            "model.moe.bias_rate=0.01 is not built with "
            "optimizer.rule='zero_one_adam'; leave it at 0.0",
            id="biases-of-experts",
        ),
        pytest.param(
            [
                *(ZERO_ONE, REPLICAS, "model.moe.num_experts=4"),
                *("model.moe.top_k=2", "model.moe.choice_bias=True"),
            ],
            "model.moe.choice_bias=True is not built with "
            "optimizer.rule='zero_one_adam'; leave it at False",
            id="biases-of-experts-that-stay",
        ),
        pytest.param(
            [ZERO_ONE, REPLICAS, "zero.memory=pinned_host"],
            "optimizer.rule='zero_one_adam' is not built for "
            "zero.optimizer_memory='pinned_host'; keep the state on the devices, or "
            "use another rule",
            id="offload-of-zero-one-adam",
        ),
        pytest.param(
            [ZERO_ONE, REPLICAS, "communication.num_local_steps=10"],
            "communication.num_local_steps=10 leaves optimizer.rule='zero_one_adam' "
            "nothing to send; use another rule, or 0",
            id="two-kinds-of-local-steps",
        ),
        pytest.param(
            [ZERO_ONE, REPLICAS, "zero.stage=3", "zero.shard_over_replica=true"],
            "optimizer.rule='zero_one_adam' needs copies of the model, and "
            "zero.shard_over_replica=True keeps one; use another rule, or "
            "zero.shard_over_replica=False",
            id="one-copy-of-the-model",
        ),
        pytest.param(
            [ONEBIT, REPLICAS, "optimizer.rule.local_step_clipper=4"],
            "optimizer.rule.local_step_clipper=4 has no effect with "
            "optimizer.rule='onebit_adam'; leave it out, or set optimizer.rule to "
            "'zero_one_adam'",
            id="local-steps-of-onebit-adam",
        ),
        pytest.param(
            [
                "optimizer.rule.var_update_scaler=4",
                "optimizer.rule.local_step_scaler=9",
            ],
            "optimizer.rule.var_update_scaler=4 has no effect with "
            "optimizer.rule='adamw'; leave it out, or set optimizer.rule to "
            "'zero_one_adam'\n"
            "optimizer.rule.local_step_scaler=9 has no effect with "
            "optimizer.rule='adamw'; leave it out, or set optimizer.rule to "
            "'zero_one_adam'",
            id="intervals-of-adamw",
        ),
    ],
)
def test_what_does_not_fit_is_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        check_config(load_config({}, *overrides), 8)
    assert str(error.value) == message
