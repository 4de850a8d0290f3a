"""ZeRO++ is refused where it is not built, in the exact words that a user reads."""

import pytest

from tests.support.refusals import case, refusal

NODES = "mesh.replica=2;zero.stage=3;zero.shard_over_replica=true"


@pytest.mark.parametrize(
    ("overrides", "num_devices", "message"),
    [
        case(
            "mesh.replica=2;zero.stage=2;zero.shard_over_replica=true",
            "zero.shard_over_replica=True has no effect with zero.stage=2; leave it at "
            "False, or set zero.stage to 3",
            id="stage",
        ),
        *(
            case(
                f"mesh.replica=2;zero.stage=3;zero.{name}=true",
                f"zero.{name}=True has no effect with zero.shard_over_replica=False; "
                "leave it at False, or set zero.shard_over_replica to True",
                id=name,
            )
            for name in (
                "secondary_partition",
                "quantized_weights",
                "quantized_gradients",
            )
        ),
        case(
            "zero.stage=3;zero.shard_over_replica=true",
            "zero.shard_over_replica=True has no effect with mesh.replica=1; leave it "
            "at False, or set mesh.replica to the number of nodes",
            id="one-node",
        ),
        case(
            f"{NODES};mesh.tensor=2",
            "zero.shard_over_replica=True is not built for mesh.tensor=2; use False, "
            "or mesh.tensor=1",
            id="tensor",
        ),
        case(
            f"{NODES};zero.memory=pinned_host",
            "zero.shard_over_replica=True is not built for "
            "zero.optimizer_memory='pinned_host'; use False, or zero.memory='device'",
            id="offload",
        ),
        case(
            f"{NODES};communication.codec=int8",
            "communication.codec='int8' needs copies of the model, and "
            "zero.shard_over_replica=True keeps one; use 'none', or "
            "zero.shard_over_replica=False",
            id="codec",
        ),
        case(
            f"{NODES};optimizer.rule=onebit_adam;optimizer.rule.freeze_step=10",
            "optimizer.rule='onebit_adam' needs copies of the model, and "
            "zero.shard_over_replica=True keeps one; use another rule, or "
            "zero.shard_over_replica=False",
            id="one-bit",
        ),
        case(
            "mesh.replica=-1;mesh.data=1;zero.stage=3;zero.shard_over_replica=true;"
            "zero.secondary_partition=true",
            "zero.secondary_partition=True stores all parameters on each device of "
            "mesh.data=1; use False, or more devices per node",
            id="one-device-per-node",
        ),
    ],
)
def test_refusals(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message
