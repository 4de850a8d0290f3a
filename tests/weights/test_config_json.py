"""A config.json becomes settings, and what zjax does not compute is refused by name."""

import dataclasses
import json
import math

import pytest

from tests.support import huggingface as golden
from tests.support.refusals import listed
from zjax.errors import ConfigError
from zjax.huggingface import model_settings
from zjax.settings import convert, mappings, schema
from zjax.weights.family import DROPOUTS
from zjax.weights.huggingface import config_of, find_kind, report_dropouts

REFUSALS = listed("huggingface.txt")
YARN = mappings.to_mapping(schema.Yarn())
LONGROPE = mappings.to_mapping(schema.Longrope())


def shape_of(family):
    return convert.from_mapping(schema.Model, golden.settings_of(family))


def test_settings_of_llama():
    assert shape_of("llama") == schema.Model(
        num_layers=2,
        embed_size=16,
        mlp_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_size=6,
        vocab_size=61,
        max_length=32,
        norm="rms_norm",
        norm_eps=1e-3,
        positions=schema.Rotary(theta=50.0, max_positions=32),
        activation="swiglu",
        use_bias=False,
        tied_head=False,
        dropout_rate=0.0,
        embedding_dropout_rate=0.0,
    )


def test_settings_of_gpt2():
    found = golden.settings_of("gpt2")
    assert found["use_bias"] and found["tied_head"] and found["dropout_rate"] == 0.1
    assert (found["norm"], found["activation"]) == ("layer_norm", "gelu")
    assert (found["mlp_size"], found["norm_eps"], found["max_length"]) == (0, 1e-5, 32)


def test_whole_numbers_are_those_of_other_types(tmp_path):
    golden.copy("gpt_oss", tmp_path / "oss", swiglu_limit=7)
    golden.copy("mixtral", tmp_path / "mixtral", router_jitter_noise=0)
    assert model_settings(tmp_path / "oss") == golden.settings_of("gpt_oss")
    assert model_settings(tmp_path / "mixtral") == golden.settings_of("mixtral")


@pytest.mark.parametrize(
    ("family", "normalises"),
    [("mixtral", True), ("qwen3_moe", False), ("deepseek_v3", True)],
)
def test_weights_of_experts_without_a_key(tmp_path, family, normalises):
    """The defaults of transformers; Mixtral has no such key."""
    golden.copy(family, tmp_path, norm_topk_prob=golden.REMOVED)
    assert model_settings(tmp_path)["moe"]["normalise"] is normalises


def refusal(tmp_path, family, **changes):
    """Lines of the refusal of a checkpoint with these values."""
    golden.copy(family, tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        model_settings(tmp_path)
    return str(error.value).replace(f"{tmp_path}/", "").splitlines()


@pytest.mark.parametrize(("given", "message"), REFUSALS.items(), ids=REFUSALS)
def test_what_is_not_computed_is_refused(given, message, tmp_path):
    family, _, changes = given.partition(" ")
    found = refusal(tmp_path, family, **json.loads(changes))
    assert found == message.splitlines()


def test_dropouts_of_gpt2_and_llama_come_in_and_go_out_apart(tmp_path):
    """Fails if two of them change places, or one is lost on the way out."""
    rates = {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0}
    golden.copy("gpt2", tmp_path, **rates)
    found = model_settings(tmp_path)
    assert [found[name] for name in DROPOUTS] == [0.3, 0.2, 0.0]
    model = convert.from_mapping(schema.Model, found)
    assert config_of(model, "gpt2").items() >= rates.items()
    as_outputs = dataclasses.replace(model, embedding_dropout_rate=-1.0)
    assert config_of(as_outputs, "gpt2")["embd_pdrop"] == 0.3
    golden.copy("llama", tmp_path, attention_dropout=0.1)
    found = model_settings(tmp_path)
    assert [found[name] for name in DROPOUTS] == [0.0, 0.0, 0.1]
    model = convert.from_mapping(schema.Model, found)
    assert config_of(model, "llama")["attention_dropout"] == 0.1


def test_old_and_new_keys_of_rotations_agree(tmp_path):
    removed = {"rope_parameters": golden.REMOVED}
    golden.copy("llama", tmp_path, rope_theta=50, rope_scaling=None, **removed)
    assert model_settings(tmp_path) == golden.settings_of("llama")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"attention_bias": True}, (False, "all")),
        ({"mlp_bias": True}, (True, "none")),
        ({"attention_bias": True, "mlp_bias": True}, (True, "use_bias")),
    ],
)
def test_biases_of_attention_and_feed_forward_are_apart(keys, expected, tmp_path):
    golden.copy("llama", tmp_path, **keys)
    found = model_settings(tmp_path)
    assert (found["use_bias"], found["attention_bias"]) == expected


def test_numbers_of_scaled_rotations(tmp_path):
    scaling = golden.settings_of("llama3")["positions"]["scaling"]
    assert scaling == mappings.to_mapping(schema.Llama3()) | {
        "kind": "llama3",
        "factor": 4.0,
        "original_length": 16,
        "high_frequency_factor": 2.0,
    }
    rope = {"type": "yarn", "factor": 2, "beta_slow": 3, "new": 1}
    golden.copy("llama", tmp_path, rope_scaling=rope, rope_parameters=golden.REMOVED)
    assert model_settings(tmp_path)["positions"]["scaling"] == YARN | {
        "kind": "yarn",
        "factor": 2.0,
        "original_length": 32,
        "beta_slow": 3.0,
    }


def test_numbers_of_longrope(tmp_path):
    """As Phi-3 was published: another name, and a factor that follows from lengths."""
    lists = {"short_factor": [1, 1.5, 2], "long_factor": [2, 3, 4]}
    golden.copy(
        *("phi3_long", tmp_path),
        rope_scaling={"type": "su", **lists},
        rope_parameters=golden.REMOVED,
        original_max_position_embeddings=8,
    )
    found = model_settings(tmp_path)
    assert found["positions"]["scaling"] == LONGROPE | {
        "kind": "longrope",
        "factor": 4.0,
        "original_length": 8,
        "short_factors": (1.0, 1.5, 2.0),
        "long_factors": (2.0, 3.0, 4.0),
    }
    model = convert.from_mapping(schema.Model, found)
    positions = dataclasses.replace(model.positions, max_positions=64)
    longer = dataclasses.replace(model, positions=positions)
    assert find_kind(longer) == "phi3"
    values = config_of(longer, "phi3")
    assert values["original_max_position_embeddings"] == 8
    assert values["rope_scaling"] == {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "attention_factor": math.sqrt(1 + math.log(4) / math.log(8)),
        **lists,
    }


@pytest.mark.parametrize(
    ("family", "rope"),
    [("phi3_long", None), ("llama", {"rope_type": "dynamic", "factor": 2.0})],
)
def test_a_model_of_long_texts_tuned_on_short_rows_goes_out_as_it_came(
    tmp_path, family, rope
):
    """Fails if the rows of a run are taken for the positions of the model."""
    changes = {"rope_scaling": rope, "rope_parameters": golden.REMOVED} if rope else {}
    golden.copy(family, tmp_path, **changes)
    found = model_settings(tmp_path)
    model = convert.from_mapping(schema.Model, found | {"max_length": 8})
    values = config_of(model, find_kind(model))
    assert values["max_position_embeddings"] == 32
    (tmp_path / "config.json").write_text(json.dumps(values))
    read = convert.from_mapping(schema.Model, model_settings(tmp_path))
    assert read == convert.from_mapping(schema.Model, found)


@pytest.mark.parametrize("given", ["8", 1, 8.0])
@pytest.mark.parametrize("is_top", [True, False])
def test_a_wrong_length_of_training_is_refused(given, is_top, tmp_path):
    lists = {"short_factor": [1, 1, 1], "long_factor": [2, 2, 2]}
    rope, name = {"type": "longrope", **lists}, "original_max_position_embeddings"
    inner = {} if is_top else {name: given}
    outer = {name: given} if is_top else {}
    changes = {"rope_parameters": golden.REMOVED, "rope_scaling": rope | inner, **outer}
    prefix = "" if is_top else "rope_scaling."
    assert refusal(tmp_path, "phi3", **changes) == [
        f"{prefix}{name}={given!r} of config.json is no int above 1; correct it there"
    ]


def test_yarn_of_phi3_is_longrope_as_in_transformers(tmp_path):
    lists = {"short_factor": [1, 1, 1], "long_factor": [2, 2, 2]}
    rope = {"type": "yarn", "factor": 4, **lists}
    changes = {"rope_parameters": golden.REMOVED, "rope_scaling": rope}
    golden.copy("phi3_long", tmp_path, **changes)
    found = model_settings(tmp_path)["positions"]["scaling"]
    assert (found["kind"], found["long_factors"]) == ("longrope", (2.0, 2.0, 2.0))
    changes["rope_scaling"] = {"type": "yarn", "factor": 4}
    assert "rope_scaling.short_factor=None" in refusal(tmp_path, "phi3", **changes)[0]


@pytest.mark.parametrize(
    ("family", "key"), [("bert", "hidden_act"), ("gpt2", "activation_function")]
)
def test_both_forms_of_gelu_come_in_and_go_out(family, key, tmp_path):
    for name, expected in (("gelu", "gelu_exact"), ("gelu_new", "gelu")):
        golden.copy(family, tmp_path, **{key: name})
        model = convert.from_mapping(schema.Model, model_settings(tmp_path))
        assert model.activation == expected
        assert find_kind(model) == family
        assert config_of(model, family)[key] == name


def test_dropouts_that_a_family_lacks_are_logged(caplog):
    settings = golden.settings_of("llama") | {"dropout_rate": 0.1}
    settings |= {"attention_dropout_rate": 0.2}
    report_dropouts(convert.from_mapping(schema.Model, settings), "llama")
    settings = golden.settings_of("bert") | {"embedding_dropout_rate": 0.3}
    report_dropouts(convert.from_mapping(schema.Model, settings), "bert")
    end = "does not go out: llama has no key for it"
    assert caplog.messages == [
        f"model.dropout_rate=0.1 {end}",
        "model.embedding_dropout_rate=0.3 does not go out: bert has no key for it",
    ]


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("mistral", {"sliding_window": golden.REMOVED}, (4096, 0)),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9}, None),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 0,
                "layer_types": golden.REMOVED,
            },
            (9, 0),
        ),
        ("gemma2", {"layer_types": golden.REMOVED}, (5, 2)),
        ("gemma3_text", {"layer_types": ["full_attention"] * 4}, None),
    ],
)
def test_windows_of_layers(family, keys, expected, tmp_path):
    golden.copy(family, tmp_path, **keys)
    window = convert.from_mapping(schema.Model, model_settings(tmp_path)).window
    found = window and (window.size, window.full_attention_every)
    assert found == expected


def test_settings_of_experts(tmp_path):
    """Fails if a token is dropped, or weights add up where they do not."""
    found = golden.settings_of("qwen3_moe")["moe"]
    expected = schema.TokenChoice(
        num_experts=4, top_k=3, first_dense=1, expert_size=12, normalise=False
    )
    assert convert.from_mapping(schema.Model, {"moe": found}).moe == expected
    assert (found["drop"], found["bias_rate"], found["num_groups"]) == ("none", 0.0, 1)
    found = golden.settings_of("mixtral")["moe"]
    assert (found["normalise"], found["top_k"], found["expert_size"]) == (True, 2, 12)
    keys = {"num_local_experts": golden.REMOVED, "num_experts": 6}
    golden.copy("qwen3_moe", tmp_path, num_experts_per_tok=1, **keys)
    found = model_settings(tmp_path)["moe"]
    assert (found["num_experts"], found["top_k"], found["normalise"]) == (6, 1, True)


def test_settings_of_latents(tmp_path):
    """Fails if a size is another's, or the bias of choices would be moved."""
    found = golden.settings_of("deepseek_v3")
    sizes = {"key_rank": 5, "query_rank": 6, "plain_size": 4, "value_size": 3}
    assert found["latent"] == sizes
    positions = found["positions"]
    assert (found["head_size"], positions["size"]) == (0, 6)
    assert positions["pairs"] == "adjacent"
    scaling = positions["scaling"]
    assert (scaling["mscale"], scaling["mscale_all_dim"]) == (0.7, 1.3)
    moe = found["moe"]
    assert moe["choice_bias"] and "bias_rate" not in moe
    assert (moe["scores"], moe["scale"], moe["first_dense"]) == ("sigmoid", 1.5, 1)
    other = golden.settings_of("deepseek_v3_whole_queries")
    assert other["latent"] == sizes | {"query_rank": 0}
    assert (other["positions"]["pairs"], other["moe"]["normalise"]) == ("halves", False)
    model = convert.from_mapping(schema.Model, found)
    moved = dataclasses.replace(model.moe, choice_bias=False, bias_rate=0.1)
    assert find_kind(dataclasses.replace(model, moe=moved)) == "deepseek_v3"
    values = config_of(model, "deepseek_v3")
    assert (values["num_nextn_predict_layers"], values["rope_interleave"]) == (0, True)


def test_scales_of_yarn_that_nothing_reads_are_left_out(tmp_path):
    rope = {"type": "yarn", "factor": 2, "mscale": 0.7}
    given = {"rope_scaling": rope, "rope_parameters": golden.REMOVED}
    golden.copy("deepseek_v3", tmp_path, **given)
    assert model_settings(tmp_path)["positions"]["scaling"]["mscale"] == 0.0


@pytest.mark.parametrize(
    ("step", "dense", "num_layers", "expected"),
    [
        (1, [], 3, (1, 0)),
        (1, None, 3, (1, 0)),
        (2, [], 5, (2, 0)),
        (2, [1], 6, (2, 2)),
        (1, [0, 1, 3], 5, (2, 1)),
        (3, [], 3, (3, 0)),
        (1, [*range(9999)], 10_000, (1, 9999)),
    ],
)
def test_layers_with_experts_go_in_and_out(step, dense, num_layers, expected, tmp_path):
    keys = {"decoder_sparse_step": step, "mlp_only_layers": dense}
    golden.copy("qwen3_moe", tmp_path, num_hidden_layers=num_layers, **keys)
    settings = model_settings(tmp_path)
    found = settings["moe"]
    assert (found["every"], found["first_dense"]) == expected
    model = convert.from_mapping(schema.Model, settings)
    assert find_kind(model) == "qwen3_moe"
    written = config_of(model, "qwen3_moe")
    assert {name: written[name] or [] for name in keys} == {
        name: value or [] for name, value in keys.items()
    }


@pytest.mark.parametrize("number", [0, 16_385, 10**12])
def test_a_number_of_layers_is_checked_before_layers_are_listed(number, tmp_path):
    """Fails if a number alone takes more memory than there is."""
    for family in ("qwen3_moe", "qwen2"):
        assert refusal(tmp_path, family, num_hidden_layers=number) == [
            f"num_hidden_layers={number} of config.json is out of range; use 1 to "
            "16384 there"
        ]


def test_old_keys_of_two_bases(tmp_path):
    """As Gemma 3 was published."""
    removed = dict.fromkeys(("rope_parameters", "layer_types"), golden.REMOVED)
    scaling = {"rope_type": "linear", "factor": 4.0}
    bases = {"rope_theta": 1000, "rope_local_base_freq": 50}
    golden.copy("gemma3_text", tmp_path, rope_scaling=scaling, **removed, **bases)
    assert model_settings(tmp_path) == golden.settings_of("gemma3_text")


def test_unknown_keys_are_reported_together(tmp_path, caplog):
    rope = {"rope_type": "default", "sections": 2}
    golden.copy("llama", tmp_path, new_scale=2.0, another=[1], rope_parameters=rope)
    model_settings(tmp_path)
    assert caplog.messages == [
        f"{tmp_path}/config.json: unknown and not read: new_scale=2.0, another=[1], "
        "rope_parameters.sections=2"
    ]


@pytest.mark.parametrize("family", golden.FAMILIES + golden.ENCODERS)
def test_keys_of_transformers_itself_are_all_known(family, caplog):
    golden.settings_of(family)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "does not exist"),
        (
            "{",
            "is not readable JSON (Expecting property name enclosed in double quotes",
        ),
        ("[" * 10**5, "is not readable JSON (it is nested too deep)"),
        (" " * (1 << 20) + "{}", "is not readable JSON (it has more than 1,048,576"),
        ("[]", "is a list, not an object"),
        (json.dumps({"model_type": []}), "model_type=[]"),
    ],
    ids=["missing", "broken", "deep", "large", "list", "no-type"],
)
def test_a_hostile_config_is_refused(text, problem, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        model_settings(tmp_path)
    assert problem in str(error.value)


def test_gpt_oss_says_that_positions_are_not_scaled(tmp_path):
    golden.copy("gpt_oss", tmp_path, rope_parameters={"rope_type": "default"})
    found = model_settings(tmp_path)
    assert found["positions"]["scaling"] is None
    values = config_of(convert.from_mapping(schema.Model, found), "gpt_oss")
    assert values["rope_scaling"] == {"rope_type": "default"}
