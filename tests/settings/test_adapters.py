"""Settings of adapters that cannot work are refused by name."""

import dataclasses

import pytest

from zjax.config.check import check_config
from zjax.config.load import load_config
from zjax.errors import ConfigError, PlanError
from zjax.estimate.mesh import find_obstacle, propose_mesh
from zjax.estimate.trial import Machine
from zjax.settings import schema
from zjax.settings.parameters import adapter_problems

RANK = {"lora": {"rank": 4}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"lora": {"rank": 4, "targets": ()}},
            "lora.targets=() adapts no layer; name some, or all by .*",
        ),
        (
            {"lora": {"rank": 4, "targets": ("(",)}},
            "lora.targets='(' is not a regular expression: missing ), unterminated "
            "subpattern at position 0; correct it, or escape characters with \\",
        ),
        (
            RANK | {"zero": {"memory": "nvme", "nvme_paths": ("/tmp",)}},
            "lora.rank=4 does not combine with zero.optimizer_memory='nvme', which has "
            "no frozen parameters; leave one of them out",
        ),
        (
            {"lora": {"quantize": {"block_size": 32}}},
            "lora.quantize.block_size=32 has no effect with lora.quantize=None; leave "
            "it out, or set lora.quantize to 'int8' or 'int4'",
        ),
        (
            {"lora": {"rank": 4, "quantize": "int4", "form": "dora"}}
            | {"precision": {"matmul_dtype": "float8"}, "mesh": {"replica": 2}}
            | {"zero": {"stage": 3, "shard_over_replica": True}},
            "lora.quantize='int4' does not combine with lora.form='dora'; leave one of "
            "them out\n"
            "lora.quantize='int4' does not combine with precision.matmul_dtype="
            "'float8'; leave one of them out\n"
            "lora.quantize='int4' does not combine with zero.shard_over_replica=True; "
            "leave one of them out",
        ),
        (
            {"lora": {"rank": 4, "dropout": 0.1, "form": "dora"}}
            | {"model": {"mlp_chunk_tokens": 64, "remat": "full"}}
            | {"mesh": {"tensor": 2}},
            "lora.dropout=0.1 does not combine with lora.form='dora'; leave one of "
            "them out\n"
            "lora.dropout=0.1 does not combine with model.mlp_chunk_tokens=64; leave "
            "one of them out\n"
            "lora.dropout=0.1 does not combine with mesh.tensor=2; leave one of them "
            "out",
        ),
        (
            {"lora": {"rank": 4, "dropout": 0.1}, "model": {"mlp_tiles": 2}},
            "lora.dropout=0.1 does not combine with model.mlp_tiles=2; leave one of "
            "them out",
        ),
        (
            {"lora": {"rank": 4, "dropout": 0.1}, "model": {"kind": "encoder"}},
            "lora.dropout=0.1 does not reach head/transform, which lora.targets="
            "('.*',) adapts; name layers of blocks there, such as blocks/, or leave "
            "it at 0.0",
        ),
        (
            {"lora": {"rank": 4, "quantize": "int8"}}
            | {"mesh": {"pipeline": 2}, "num_microbatches": 2},
            "lora.quantize='int8' does not combine with mesh.pipeline=2; leave one of "
            "them out",
        ),
        (
            {"lora": {"rank": 4, "quantize": "int4"}}
            | {"model": {"moe": {"num_experts": 4}}, "mesh": {"tensor": 2}},
            "lora.quantize='int4' does not combine with model.moe='token_choice'; "
            "leave one of them out\n"
            "lora.quantize='int4' does not combine with mesh.tensor=2; leave one of "
            "them out",
        ),
    ],
)
def test_problem_is_told(settings, expected):
    """Fails if a run begins without the adapters that it is asked for."""
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(settings), num_devices=8)
    assert str(caught.value) == expected


def test_dropout_does_not_reach_modules_of_users():
    """Fails if a run of one's own module trains without the dropout it asks for."""
    config = load_config({"lora": {"rank": 4, "dropout": 0.1}})
    with pytest.raises(ConfigError) as caught:
        check_config(config, num_devices=1, user_model=True)
    assert str(caught.value) == (
        "lora.dropout=0.1 has no effect on the model that was given; leave it out, "
        "or give no model"
    )


def test_codes_leave_axes_for_zjax_to_choose():
    """Fails if mesh="auto" refuses codes; meshes that codes cannot have are dropped."""
    model = {"num_layers": 2, "embed_size": 64, "num_heads": 2, "vocab_size": 300}
    settings = {"lora": {"rank": 4, "quantize": "int8"}, "model": model, "mesh": "auto"}
    config = load_config(settings)
    assert list(adapter_problems(config, 2)) == []
    proposal = propose_mesh(config, Machine(2, 2, 1e12))
    assert (proposal.mesh.data, proposal.mesh.pipeline, proposal.mesh.tensor) == (
        2,
        1,
        1,
    )
    with pytest.raises(PlanError):
        propose_mesh(config, Machine(2, 2, 1.0))
    for axis in ("tensor", "pipeline"):
        sized = dataclasses.replace(schema.Mesh(), **{axis: 2})
        assert "lora.quantize='int8'" in find_obstacle(
            config, sized, Machine(2, 2, 1.0), None
        )
