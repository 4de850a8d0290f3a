"""Weights of Hugging Face checkpoints compute what they do in their own library."""

import collections
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.support import huggingface as golden
from tests.support.refusals import checkpoint_error, config_error
from zjax.checkpoint import start as weights
from zjax.errors import CheckpointError
from zjax.generation.generate import generate
from zjax.sharding import plan as plans
from zjax.weights import config_json as settings
from zjax.weights.huggingface import TOKENS, adapted
from zjax.weights.source import Entry

LLAMA = golden.FOLDER / "llama"
SHARDED = ("zero.stage=3", "zero.min_shard_elements=8")


def logits_of(run, tokens):
    return np.asarray(nnx.jit(lambda model, x: model(x))(run.bind(run.state), tokens))


@pytest.mark.parametrize("family", golden.FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(family):
    """Fails if a matrix is transposed, a part swapped, or a constant another.

    Each token of a text is the most likely one of the whole model, with whose texts
    tests of the cache compare theirs. Experts behind a dense layer are generated, too.
    """
    run, expected = golden.start(golden.make_config(family)), golden.expected_of(family)
    text, length = expected["text"], expected["tokens"].shape[1]
    logits = logits_of(run, text.astype(np.int32))
    np.testing.assert_allclose(
        logits[:, :length], expected["logits"], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(
        logits[:, length - 1 : -1].argmax(2), text[:, length:]
    )
    if family == "deepseek_v3":
        assert_generated(run, expected)


def test_the_config_is_read_once(monkeypatch):
    """Fails if shape and quantisation may be those of two versions of the file."""
    config, paths = golden.make_config("llama"), []
    read = settings.read_text
    monkeypatch.setattr(settings, "read_text", lambda x: paths.append(x) or read(x))
    source = weights.open_source(str(LLAMA))
    wanted = {TOKENS: Entry((61, 16), "float32")}
    path = LLAMA / "config.json"
    adapted(source, wanted, path, config.model, config.checkpoint)
    assert paths == [path]


@pytest.mark.parametrize(
    ("kind", "length", "numbers"),
    [
        ("linear", 32, {}),
        ("dynamic", 8, {}),
        ("yarn", 32, {"original_max_position_embeddings": 16, "beta_fast": 4.0}),
    ],
)
def test_scaled_rotations_are_those_of_transformers(kind, length, numbers, tmp_path):
    """Those of `dynamic` change with each token that is written."""
    rope = {"type": kind, "factor": 4.0} | numbers
    golden.copy(
        *("llama", tmp_path),
        max_position_embeddings=length,
        rope_parameters=golden.REMOVED,
        rope_theta=50.0,
        rope_scaling=rope,
    )
    run = golden.start(golden.make_config("llama", directory=tmp_path))
    expected = golden.expected_of("llama", f"expected_{kind}")
    assert_logits(run, expected)
    if kind == "dynamic":
        assert_generated(run, expected)


def test_longrope_decides_by_the_length_of_a_row():
    """Fails if long rows take short factors: those of up to 18 tokens."""
    run = golden.start(golden.make_config("phi3_long"))
    assert_logits(run, golden.expected_of("phi3_long", "expected_longer"))


@pytest.mark.parametrize(
    "overrides",
    [(), ("zero.offload=pinned_host", "model.remat=full")],
    ids=["one-program", "block-by-block"],
)
def test_longrope_decides_once_for_a_text(overrides, monkeypatch):
    """Fails if keys of a cache rotate by other factors than later queries.

    The first text has 22 tokens in all, the second, behind padding, 16 of the 18 of
    the training before. Without a cache the length of all rows decides.
    """
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    tokens = golden.expected_of("phi3_long")["tokens"].astype(np.int32)
    run = golden.start(golden.make_config("phi3_long", *overrides))
    lengths = jnp.array([12, 6])
    found = run.generate(run.state, tokens, lengths=lengths, max_new_tokens=10)
    rows = np.stack([found[0], np.roll(found[1], -6)])
    as_long, as_short = likely(rows), likely(rows[:, :16])
    assert (as_long[0, 11:15] != as_short[0, 11:15]).any()
    assert (as_long[1, 5:15] != as_short[1, 5:15]).any()
    np.testing.assert_array_equal(rows[0, 12:], as_long[0, 11:-1])
    np.testing.assert_array_equal(rows[1, 6:16], as_short[1, 5:-1])


@functools.cache
def whole_model():
    """A run without a cache."""
    return golden.start(golden.make_config("phi3_long"))


def likely(tokens):
    """The most likely token behind each token, by factors of the length of the rows."""
    return logits_of(whole_model(), tokens).argmax(2)


def assert_logits(run, expected):
    logits = logits_of(run, expected["tokens"].astype(np.int32))
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-5, atol=1e-5)


def assert_generated(run, expected):
    tokens = jnp.asarray(expected["tokens"], jnp.int32)
    num_new = expected["text"].shape[1] - tokens.shape[1]
    text = generate(run.bind(run.state), tokens, max_new_tokens=num_new)
    np.testing.assert_array_equal(text, expected["text"])


@pytest.mark.parametrize(
    ("family", "num_devices", "overrides"),
    [
        ("llama", 8, SHARDED),
        ("gpt2", 4, (*SHARDED, "mesh.tensor=2")),
        ("phi3", 4, (*SHARDED, "mesh.tensor=4")),
        ("olmo2", 4, (*SHARDED, "mesh.tensor=2")),
        ("qwen2", 4, ("mesh.sequence=4",)),
        pytest.param(
            *("gemma2", 4, ("mesh.tensor=2", "mesh.sequence=2")),
            id="windows-and-caps-of-split-sequences",
        ),
        pytest.param(
            *("gemma3_text", 1, ("zero.offload=pinned_host", "model.remat=full")),
            id="windows-by-layer-on-the-host",
        ),
        (
            *("qwen3", 1),
            ("zero.offload=pinned_host", "zero.offload.parameter_memory=pinned_host"),
        ),
        ("llama", 1, ("model.mlp_tiles=3",)),
        pytest.param(
            *("gpt_oss", 8, (*SHARDED, "mesh.expert=2", "mesh.tensor=2")),
            id="joined-experts-and-sinks",
        ),
        pytest.param(
            *("deepseek_v3", 8, (*SHARDED, "mesh.expert=2", "mesh.tensor=2")),
            id="whole-latents-and-split-heads",
        ),
        pytest.param(
            *("deepseek_v3", 4, ("mesh.tensor=2", "mesh.sequence=2")),
            id="latents-of-split-sequences",
        ),
        pytest.param(
            *("qwen3_moe", 8, (*SHARDED, "mesh.expert=2", "mesh.tensor=2")),
            id="experts-in-parts-and-dense-layers",
        ),
    ],
)
def test_each_device_reads_its_slices(family, num_devices, overrides, monkeypatch):
    """Fails if a slice of an array is another slice of its tensor."""
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    expected = golden.expected_of(family)
    config = golden.make_config(family, *overrides)
    run = golden.start(config, num_devices)
    np.testing.assert_allclose(
        logits_of(run, expected["tokens"].astype(np.int32)),
        expected["logits"],
        rtol=2e-5,
        atol=2e-5,
    )


def test_windows_count_from_the_first_token_behind_padding():
    """Fails if a window, or a rotation, counts columns of padded prompts."""
    expected = golden.expected_of("gemma3_text")
    run = golden.start(golden.make_config("gemma3_text"))
    tokens = np.pad(expected["tokens"].astype(np.int32), ((0, 0), (3, 0)))
    text = generate(
        *(run.bind(run.state), jnp.asarray(tokens)),
        lengths=jnp.array([12, 12]),
        max_new_tokens=6,
    )
    np.testing.assert_array_equal(text[:, 3:], expected["text"])


def test_no_read_is_larger_than_a_shard(monkeypatch):
    """Fails if a device reads whole tensors, or a process all layers at once."""
    entries = weights.open_source(str(LLAMA)).entries
    sizes = golden.record_reads(monkeypatch)
    golden.start(golden.make_config("llama", *SHARDED), 8)
    assert sizes.keys() == entries.keys()
    for name in entries:
        if "proj" in name:
            assert max(sizes[name]) == np.prod(entries[name].shape) // 8, name


def test_each_device_has_its_experts_alone(monkeypatch):
    """Fails if a device reads, or holds, experts of other devices."""
    sizes = golden.record_reads(monkeypatch)
    expected = golden.expected_of("mixtral")
    config = golden.make_config("mixtral", "mesh.expert=4", "zero.stage=0")
    run = golden.start(config, 8)
    experts = run.state.master["blocks"]["mlp"]["experts"]["up"]["kernel"]
    held = collections.Counter(
        (shard.index[1].start, shard.data.nbytes)
        for shard in experts.addressable_shards
    )
    expert_bytes = 2 * 16 * 2 * 12 * 4  # of both layers
    assert held == {(number, expert_bytes): 2 for number in range(4)}
    assert [len(x) for name, x in sizes.items() if ".w1." in name] == [1] * 8
    tokens = expected["tokens"].astype(np.int32)
    np.testing.assert_allclose(
        logits_of(run, tokens), expected["logits"], rtol=2e-5, atol=2e-5
    )


def test_a_mixture_starts_from_it():
    """Its experts are copies, so that it computes what the dense model does."""
    moe = ("model.moe.num_experts=2", "model.moe.top_k=2")
    expected = golden.expected_of("llama")
    run = golden.start(golden.make_config("llama", *moe))
    tokens = expected["tokens"].astype(np.int32)
    np.testing.assert_allclose(
        logits_of(run, tokens), expected["logits"], rtol=2e-4, atol=2e-5
    )


def test_the_log_says_which_names_it_found(tmp_path, caplog):
    golden.copy("llama_biases", tmp_path)
    tensors = read_all(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write(tmp_path, tensors | {buffer: np.zeros(2, np.float32)})
    golden.start(golden.make_config("llama_biases", directory=tmp_path))
    assert caplog.messages[-1] == (
        f"checkpoint.init_from='{tmp_path}' has the tensor names of Hugging Face, "
        "beginning with 'model.'; not read, as logits do not need them: "
        f"lm_head.weight, {buffer}"
    )


def test_layers_behind_the_last_one_are_not_read(tmp_path, caplog):
    """Those of DeepSeek-V3 predict further tokens; the log names the layer once."""
    family = "deepseek_v3_whole_queries"
    golden.copy(family, tmp_path, num_nextn_predict_layers=1)
    further = "model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"
    more = dict.fromkeys(further, np.zeros(2, np.float32))
    write(tmp_path, read_all(tmp_path) | more)
    run = golden.start(golden.make_config(family, directory=tmp_path))
    assert caplog.messages[-1].endswith("need them: model.layers.2.*")
    expected = golden.expected_of(family)
    tokens = jnp.asarray(expected["tokens"], jnp.int32)
    np.testing.assert_allclose(
        logits_of(run, tokens), expected["logits"], rtol=1e-5, atol=1e-5
    )


def test_a_checkpoint_without_a_head_has_no_prefix(tmp_path, caplog):
    """As the published GPT-2, whose weights may be of 16 bits; its file is named."""
    golden.copy("gpt2", tmp_path)
    named = {n.removeprefix("transformer."): x for n, x in read_all(tmp_path).items()}
    write(tmp_path, {n: x.astype(ml_dtypes.bfloat16) for n, x in named.items()})
    config = golden.make_config("gpt2", directory=tmp_path)
    named_file = str(tmp_path / "model.safetensors")
    beginning = dataclasses.replace(config.checkpoint, init_from=named_file)
    run = golden.start(dataclasses.replace(config, checkpoint=beginning))
    assert caplog.messages[-1].endswith("Hugging Face, without a prefix")
    table = run.state.master["embedding"]["tokens"]
    np.testing.assert_array_equal(
        table, named["wte.weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_names_of_zjax_stay_as_they_are_beside_a_config(tmp_path):
    """Fails if a config.json alone decides on the names."""
    run = golden.start(golden.make_config("mistral"))
    golden.copy("mistral", tmp_path)
    table = run.state.master["embedding"]["tokens"]
    named = {
        ".".join(str(k.key) for k in keys): np.asarray(x)
        for keys, x in jax.tree_util.tree_leaves_with_path(run.state.master)
    }
    write(tmp_path, named)
    again = golden.start(golden.make_config("mistral", directory=tmp_path))
    np.testing.assert_array_equal(again.state.master["embedding"]["tokens"], table)


def read_all(directory):
    return safetensors.numpy.load_file(directory / "model.safetensors")


def write(directory, tensors):
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


def test_tensors_that_differ_are_named_in_its_own_terms(tmp_path):
    golden.copy("gpt2", tmp_path)
    tensors = read_all(tmp_path)
    fused = "transformer.h.1.attn.c_attn.weight"
    tensors[fused] = tensors[fused].T.copy()
    del tensors["transformer.ln_f.bias"]
    tensors["adapter"] = np.zeros(3, np.float32)
    write(tmp_path, tensors)
    with checkpoint_error(
        f"{fused}='float32[16,48]' is float32[48,16] in {tmp_path}; make the two "
        f"agree\ntransformer.ln_f.bias='float32[16]' is missing from {tmp_path}; add "
        "it to the checkpoint, or remove it from the model\n"
        f"adapter='float32[3]' is in {tmp_path} but not in this model; remove it from "
        "the checkpoint, or add it to the model\n"
        f"checkpoint='{tmp_path}' differs from this model in 3 arrays, 3 of them "
        "shown; use the configuration that wrote it, or another checkpoint"
    ):
        golden.start(golden.make_config("gpt2", directory=tmp_path))


def test_files_that_disagree_with_the_index_are_all_named(tmp_path):
    golden.copy("llama", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    places = values["weight_map"]
    places["lm_head.weight"] = places["model.embed_tokens.weight"]
    del places["model.norm.weight"]
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as error:
        golden.start(golden.make_config("llama", directory=tmp_path))
    first, second = (tmp_path / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    assert [f"{p.value} {p.problem}" for p in error.value.problems] == [
        f"{index} names lm_head.weight, which {first} lacks",
        f"{index} does not name model.norm.weight, which {second} holds",
    ]


def test_files_that_are_cut_or_missing_are_all_named(tmp_path):
    golden.copy("llama", tmp_path)
    first, second = (tmp_path / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    with pytest.raises(CheckpointError) as error:
        golden.start(golden.make_config("llama", directory=tmp_path))
    assert [problem.value for problem in error.value.problems] == [
        str(first),
        str(second),
    ]


def test_another_shape_is_refused_setting_by_setting():
    overrides = (
        "model.num_layers=3",
        "model.positions.theta=10000.0",
        "model.max_length=8",
    )
    config = golden.make_config("llama", *overrides)
    path = LLAMA / "config.json"
    with config_error(
        f"model.positions.theta=10000.0 is not the 50.0 of {path}; use 50.0\n"
        f"model.num_layers=3 is not the 2 of {path}; use 2"
    ):
        golden.start(config)
    config = golden.make_config("gpt2", "model.max_length=8")
    path = golden.FOLDER / "gpt2" / "config.json"
    with config_error(f"model.max_length=8 is not the 32 of {path}; use 32"):
        golden.start(config)
