"""BERT and RoBERTa compute what they do in transformers, and learn masked tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.support import huggingface as golden
from zjax.errors import CheckpointError, ConfigError
from zjax.huggingface import model_settings

each_family = pytest.mark.parametrize("family", golden.ENCODERS)


def logits_of(run, batch):
    model, batch = run.bind(run.state), jax.tree.map(jnp.asarray, batch)
    return np.asarray(nnx.jit(lambda model, x: model.logits(x))(model, batch))


def check(run, family, **changes):
    """Compares logits of all tokens but padding."""
    expected = golden.expected_of(family)
    names = "tokens", "token_types", "lengths"
    batch = {name: expected[name].astype(np.int32) for name in names} | changes
    found = logits_of(run, {n: x for n, x in batch.items() if x is not None})
    for row, length in enumerate(expected["lengths"]):
        wanted = expected["logits"][row, :length]
        np.testing.assert_allclose(found[row, :length], wanted, rtol=1e-5, atol=1e-5)


@each_family
def test_logits_are_those_of_transformers(family):
    """Fails if the GELU, a type, the order of norms or the first position differs."""
    run, expected = golden.start(golden.make_config(family)), golden.expected_of(family)
    check(run, family)
    tokens, lengths = (expected[n].astype(np.int32) for n in ("tokens", "lengths"))
    is_token = np.arange(tokens.shape[1]) < lengths[:, None]
    check(run, family, tokens=np.where(is_token, tokens, 7))
    segments = is_token.astype(np.int32)
    check(run, family, lengths=None, segment_ids=segments)
    with pytest.raises(AssertionError):
        check(run, family, lengths=None)
    if family == "roberta":  # has one type, as a batch without types has
        check(run, family, token_types=None)


def test_settings_of_roberta():
    found = golden.settings_of("roberta")
    names = "max_length", "num_token_types", "activation"
    assert [found[name] for name in names] == [32, 1, "gelu_exact"]
    assert found["positions"] == {"kind": "learned", "first": 3}
    rates = "dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"
    assert [found[name] for name in rates] == [0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("family", "num_devices", "overrides"),
    [
        ("bert", 8, ("zero.stage=3", "zero.min_shard_elements=8", "mesh.tensor=2")),
        ("roberta", 4, ("mesh.sequence=4",)),
    ],
    ids=["sharded-tensors", "split-sequences"],
)
def test_devices_compute_what_one_does(family, num_devices, overrides):
    """Fails if a slice is another one, or types and positions are not split."""
    check(golden.start(golden.make_config(family, *overrides), num_devices), family)


def renamed(name):
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return name.replace("LayerNorm.bias", "LayerNorm.beta")


def test_old_names_and_other_heads_are_those_of_published_files(tmp_path, caplog):
    """As bert-base-uncased was published, with a pooler and a head of pairs."""
    golden.copy("bert", tmp_path)
    file = tmp_path / "model.safetensors"
    found = {renamed(n): x for n, x in safetensors.numpy.load_file(file).items()}
    assert "bert.embeddings.LayerNorm.gamma" in found
    others = {
        "bert.pooler.dense.weight": np.zeros((16, 16), np.float32),
        "cls.predictions.decoder.weight": np.zeros((61, 16), np.float32),
        "cls.seq_relationship.bias": np.zeros(2, np.float32),
    }
    safetensors.numpy.save_file(found | others, file)
    check(golden.start(golden.make_config("bert", directory=tmp_path)), "bert")
    assert caplog.messages[-1].endswith(f"not need them: {', '.join(others)}")


def test_a_checkpoint_with_another_head_names_what_it_lacks(tmp_path):
    """As one of BertForSequenceClassification."""
    golden.copy("bert", tmp_path)
    file = tmp_path / "model.safetensors"
    found = safetensors.numpy.load_file(file)
    body = {n: x for n, x in found.items() if not n.startswith("cls.predictions.t")}
    classifier = {"classifier.weight": np.zeros((2, 16), np.float32)}
    safetensors.numpy.save_file(body | classifier, file)
    with pytest.raises(CheckpointError) as error:
        golden.start(golden.make_config("bert", directory=tmp_path))
    head = "cls.predictions.transform"
    text = str(error.value)
    assert f"{head}.dense.weight='float32[16,16]' is missing from {tmp_path}" in text
    assert f"classifier.weight='float32[2,16]' is in {tmp_path} but not in" in text


def test_what_an_encoder_may_ask_for_is_refused_at_once(tmp_path):
    changes = {
        "hidden_act": "relu",
        "position_embedding_type": "relative_key",
        "is_decoder": True,
        "add_cross_attention": True,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "hidden_dropout_prob": "0.1",
    }
    golden.copy("roberta", tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        model_settings(tmp_path)
    gelus = "'gelu_new' or 'gelu_pytorch_tanh' or 'gelu'"
    alone = {"hidden_act": gelus, "position_embedding_type": "'absolute' or None"}
    alone |= {"is_decoder": False, "add_cross_attention": False}
    alone |= {"tie_word_embeddings": True}
    path = tmp_path / "config.json"
    assert str(error.value).splitlines() == [
        *(
            f"{name}={changes[name]!r} of {path} is not supported: zjax computes "
            f"{value} alone; use a checkpoint without it"
            for name, value in alone.items()
        ),
        f"pad_token_id=None of {path} is not of type int; correct it there",
        f"hidden_dropout_prob='0.1' of {path} is not of type float; correct it there",
    ]


def test_masked_tokens_are_learned_from_where_a_checkpoint_stands():
    """Fails if dropout, types or ignored targets break training."""
    quick = "optimizer.schedule.num_warmup_steps=0", "optimizer.peak_learning_rate=0.01"
    run = golden.start(golden.make_config("bert", *quick, "data.length=16"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 61, (8, 16)).astype(np.int32)
    is_masked = rng.random(tokens.shape) < 0.3
    batch = {
        "tokens": np.where(is_masked, 3, tokens),
        "targets": np.where(is_masked, tokens, -100),
        "token_types": (np.arange(16) >= 8).astype(np.int32)[None].repeat(8, 0),
        "lengths": np.full(8, 14, np.int32),
    }
    state, losses = run.state, []
    for _ in range(40):
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
