"""Which layers have experts, and the words for settings that cannot work."""

import pytest

from tests.support.refusals import case, refusal
from zjax import config as zconfig
from zjax.errors import ConfigError
from zjax.settings import schema
from zjax.settings.mixture import experts_by_layer, num_blocks, segment_shapes

MOE = "model.moe"
REFUSED = [
    case(
        f"{MOE}.num_experts=-1",
        "model.moe.num_experts=-1 is out of range; use 1 to 65536",
        id="negative",
    ),
    case(
        f"{MOE}.num_experts=(4,0)",
        "model.moe.num_experts=(4, 0) is out of range; use 1 to 65536",
        id="a-layer-without",
    ),
    case(
        f"{MOE}.num_experts=(4,8);{MOE}.every=4",
        "model.moe.num_experts=(4, 8) has 2 numbers for 3 MoE layers; give 3, or one "
        "int for all",
        id="pyramid-of-another-height",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.top_k=5",
        "model.moe.top_k=5 is above the 4 experts to choose from; use at most 4",
        id="more-choices-than-experts",
    ),
    case(
        f"{MOE}.num_experts=8;{MOE}.num_groups=4;{MOE}.top_k=3",
        "model.moe.top_k=3 is above the 2 experts to choose from; use at most 2",
        id="more-choices-than-a-group-has",
    ),
    case(
        f"{MOE}.num_experts=8;{MOE}.num_groups=3",
        "model.moe.num_groups=3 does not divide 8 experts; use 1, 2, 4 or 8",
        id="groups-do-not-divide",
    ),
    case(
        f"{MOE}.num_experts=8;{MOE}.num_groups=2;{MOE}.top_groups=3",
        "model.moe.top_groups=3 is above model.moe.num_groups=2; use at most 2",
        id="more-groups-than-there-are",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.every=0",
        "model.moe.every=0 is out of range; use 1 or more",
        id="every-0",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.every=13",
        "model.moe.every=13 leaves none of model.num_layers=12 to experts; use at most "
        "12",
        id="every-beyond-the-last",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.first_dense=12",
        "model.moe.first_dense=12 leaves none of model.num_layers=12 to experts; use "
        "at most 11",
        id="all-dense",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.drop=position;{MOE}.capacity_factor=0.0",
        "model.moe.capacity_factor=0.0 is out of range; use more than 0",
        id="capacity-0",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.capacity_factor=2.0",
        "model.moe.capacity_factor=2.0 has no effect with model.moe.drop='none'; leave "
        "it at 1.0, or set model.moe.drop",
        id="capacity-without-drop",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.normalise=False",
        "model.moe.normalise=False has no effect with model.moe.top_k=1; leave it at "
        "True, or set model.moe.top_k",
        id="one-weight-to-normalise",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.shared_gate=True",
        "model.moe.shared_gate=True has no effect with model.moe.num_shared=0; leave "
        "it at False, or set model.moe.num_shared",
        id="gate-on-nothing",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.balance_loss=0.0;{MOE}.balance_scope=sequence",
        "model.moe.balance_scope='sequence' has no effect with "
        "model.moe.balance_loss=0.0; leave it at 'microbatch', or set "
        "model.moe.balance_loss",
        id="scope-of-no-loss",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.sampling=second",
        "model.moe.sampling='second' samples a second expert, and model.moe.top_k=1; "
        "use 'first', or top_k=2",
        id="no-second-expert",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.bias_rate=0.001;{MOE}.sampling=first",
        "model.moe.bias_rate=0.001 is not added to the choice of "
        "model.moe.sampling='first'; use 0, or sampling='none'",
        id="bias-of-samples",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.top_k=4;{MOE}.bias_rate=0.001",
        "model.moe.bias_rate=0.001 has no effect, as each token chooses all 4 experts; "
        "use 0, or more experts",
        id="bias-where-all-are-chosen",
    ),
    case(
        f"{MOE}.num_experts=1;{MOE}.bias_rate=0.001;{MOE}.jitter=0.01",
        "model.moe.bias_rate=0.001 has no effect, as each token chooses all 1 experts; "
        "use 0, or more experts\n"
        "model.moe.jitter=0.01 has no effect with model.moe.num_experts=1; leave it at "
        "0.0, or set model.moe.num_experts",
        id="one-expert",
    ),
    case(
        f"{MOE}.num_experts=8;{MOE}.num_groups=4;{MOE}.top_groups=4",
        "model.moe.top_groups=4 leaves out none of model.moe.num_groups=4; use fewer, "
        "or 1 for both",
        id="all-groups",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.drop=first_choices",
        "model.moe.drop='first_choices' has no second choices to drop first with "
        "model.moe.top_k=1; use 'position', or top_k=2",
        id="first-choices-alone",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.top_k=2;{MOE}.drop=position;"
        f"{MOE}.capacity_factor=2.0;{MOE}.eval_capacity_factor=2.5",
        "model.moe.drop='position' drops no token: each of 4 experts has room for all; "
        "use 'none', or capacity factors below 2",
        id="room-for-all",
    ),
    case(
        f"{MOE}=expert_choice;{MOE}.num_experts=4;{MOE}.capacity_factor=5.0",
        "model.moe.capacity_factor=5.0 gives a token more than all 4 experts; use at "
        "most 4",
        id="more-choices-of-experts",
    ),
    case(
        f"{MOE}=expert_choice;{MOE}.top_k=2;{MOE}.drop=random",
        "model.moe.top_k=2 has no effect with model.moe='expert_choice'; leave it out, "
        "or set model.moe to 'token_choice'\n"
        "model.moe.drop='random' has no effect with model.moe='expert_choice'; leave "
        "it out, or set model.moe to 'token_choice'",
        id="choices-of-tokens",
    ),
    case(
        f"{MOE}.num_experts=4;model.mlp_tiles=2",
        "model.mlp_tiles=2 tiles a feed-forward, and model.moe replaces it; use 1",
        id="tiles",
    ),
    case(
        f"{MOE}.num_experts=6;mesh.expert=4",
        "mesh.expert=4 does not divide 6 experts; use 1, 2, 3 or 6",
        id="experts-do-not-divide",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.top_k=2;mesh.expert=8",
        "mesh.expert=8 does not divide 4 experts; use 1, 2 or 4",
        id="more-devices-than-experts",
    ),
    case(
        f"{MOE}.num_experts=8;mesh.data=1;mesh.expert=8;global_batch_size=4",
        "global_batch_size=4 does not divide by 8 batch shards x num_microbatches=1; "
        "use a multiple of 8",
        id="fewer-tokens-than-shares",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.drop=position;{MOE}.min_capacity=0",
        "model.moe.min_capacity=0 is out of range; use 1 or more",
        id="least-capacity-0",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.every=2;mesh.pipeline=8",
        "mesh.pipeline=8 makes more stages than the 6 blocks of model.moe.every=2; use "
        "at most 6",
        id="stages",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.first_dense=3;model.layers_per_scan=2",
        "model.layers_per_scan=2 does not divide segments of 3, 9 blocks; use 1 or 3",
        id="scan",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.every=2;deterministic=True",
        "deterministic=True repeats a cuDNN kernel in layers of different kinds; use "
        "False, or model.attention='xla'",
        id="deterministic",
    ),
    case(
        f"{MOE}.num_experts=4;{MOE}.balance_scope=sequence;mesh.tensor=2",
        "model.moe.balance_scope='sequence' cannot run with mesh.tensor=2, which "
        "splits the tokens of a sequence; use 'microbatch', or mesh.tensor=1",
        id="sequences-that-are-split",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), REFUSED)
def test_refused(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message


def test_number_of_experts_of_another_type():
    with pytest.raises(ConfigError) as error:
        zconfig.load_config({}, "model.moe.num_experts=many")
    assert str(error.value) == ("model.moe.num_experts='many' is a str; expected int")


def make_model(num_layers, **moe):
    return schema.Model(num_layers=num_layers, moe=schema.TokenChoice(**moe))


def shapes_of(model):
    return tuple((x.num_experts, x.num_blocks) for x in segment_shapes(model))


def test_deepspeed_puts_experts_in_every_second_layer():
    model = make_model(6, num_experts=8, every=2)
    assert experts_by_layer(model) == (0, 8, 0, 8, 0, 8)
    assert shapes_of(model) == (((0, 8), 3),)
    assert num_blocks(model) == 3


def test_dense_layers_first():
    model = make_model(8, num_experts=8, every=3, first_dense=1)
    assert experts_by_layer(model) == (0, 0, 0, 8, 0, 0, 8, 0)
    assert shapes_of(model) == (((0,), 1), ((0, 0, 8), 2), ((0,), 1))


def test_pyramid():
    model = make_model(6, num_experts=(4, 4, 8), every=2)
    assert shapes_of(model) == (((0, 4), 2), ((0, 8), 1))


def test_width_of_an_expert_follows_the_model():
    config = zconfig.load_config(
        {}, "model.moe.num_experts=4", "model.mlp_size=100", "model.mlp_size=200"
    )
    assert config.model.moe.expert_size == 200


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"num_experts": 0, "choice": "tokens", "top_k": 1}, None),
        ({"num_experts": 4, "choice": "tokens"}, schema.TokenChoice(num_experts=4)),
        (
            {"num_experts": 4, "choice": "experts", "top_k": 1, "drop": "none"},
            schema.ExpertChoice(num_experts=4),
        ),
    ],
)
def test_a_record_that_lists_all_settings_names_the_side_that_chooses(record, expected):
    found = zconfig.load_config({"model": {"moe": record, "mlp_size": 8}})
    shape = schema.Model(moe=expected, mlp_size=8)
    assert found.model.moe == shape.moe


def test_a_setting_inside_turns_on_the_choice_of_tokens():
    config = zconfig.load_config({}, "model.moe.top_k=2")
    assert isinstance(config.model.moe, schema.TokenChoice)
    config = zconfig.load_config({}, "model.moe.choice=experts")
    assert isinstance(config.model.moe, schema.ExpertChoice)
