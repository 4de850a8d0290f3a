"""Models go out as GGUF files, and come back; llama.cpp computes what zjax does.

The comparison with llama.cpp needs `pip install llama-cpp-python==0.3.36`, which builds
it in about 25 minutes on one core.
"""

import dataclasses
import json
import pathlib
import struct

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import huggingface as golden
from tests.support import language
from tests.support.refusals import checkpoint_error, config_error, data_error
from tests.weights.test_compressed_tensors import (
    arrays_of,
    golden_tensors,
    read,
    source_of,
)
from zjax.checkpoint.export_gguf import export_gguf
from zjax.checkpoint.store import Store
from zjax.data import gguf_vocabulary
from zjax.data.gguf_vocabulary import vocabulary_of
from zjax.data.tokenizer import load_tokenizer, write_bytes_tokenizer
from zjax.huggingface import model_settings
from zjax.run.saving import save
from zjax.settings import schema
from zjax.settings.convert import from_mapping
from zjax.weights import gguf_file, gguf_names, huggingface
from zjax.weights.source import Entry, Source

WRITTEN = ("gpt2", "llama", "llama_biases", "mistral", "qwen2", "qwen3")
"""Golden checkpoints that llama.cpp has an architecture for, as they are."""


def write(path, source, model, quantize="f32"):
    """Writes tensors of Hugging Face as a GGUF file without a tokenizer."""
    kind = huggingface.find_kind(model)
    values = huggingface.config_of(model, kind)
    architecture = gguf_names.architecture_of(model, kind, values)
    metadata = {
        f"{architecture.name}.{name}": value
        for name, value in gguf_names.metadata_of(model, architecture, values).items()
    }
    tensors = gguf_names.to_gguf(source, model, kind)
    factors = gguf_names.rotation_factors(model, architecture)
    tensors = tensors.joined(source_of(**factors))
    metadata["tokenizer.ggml.model"] = "none"
    gguf_file.write(path, architecture.name, metadata, tensors, quantize)
    return path


def arrays_of_file(path):
    """Arrays of the built-in model that a GGUF file gives."""
    model = from_mapping(schema.Model, model_settings(path))
    source = gguf_file.source_of(gguf_file.open_header(path))
    wanted = {huggingface.TOKENS: Entry((), "float32")}
    return read(
        huggingface.adapted(source, wanted, path, model, schema.Checkpoint())
    ), model


@pytest.mark.parametrize("family", WRITTEN)
def test_a_model_comes_back_bit_for_bit(family, tmp_path):
    source, model, _ = golden_tensors(family)
    path = write(tmp_path / "model.gguf", source, model)
    back, found = arrays_of_file(path)
    assert found == model
    for name, array in arrays_of(family, golden.FOLDER / family).items():
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize("family", WRITTEN)
def test_the_reference_reads_the_file(family, tmp_path):
    """Fails if names, shapes or bytes are not those of the library of the format."""
    source, model, _ = golden_tensors(family)
    path = write(tmp_path / "model.gguf", source, model)
    tensors = gguf.GGUFReader(path).tensors
    ours = gguf_file.source_of(gguf_file.open_header(path))
    assert [x.name for x in tensors] == [*ours.entries]
    for tensor in tensors:
        expected = tensor.data.reshape(tensor.shape[::-1].tolist())
        np.testing.assert_array_equal(ours.read_all(tensor.name), expected)


def test_channels_of_llama_alternate(tmp_path):
    """Fails if the rows of queries keep the order of Hugging Face."""
    source, model, _ = golden_tensors("llama")
    kind = huggingface.find_kind(model)
    found = gguf_names.to_gguf(source, model, kind).read_all("blk.0.attn_k.weight")
    given = source.read_all("model.layers.0.self_attn.k_proj.weight")
    half = model.head_size // 2
    for head in range(model.num_kv_heads):
        for channel in range(half):
            first = head * model.head_size
            for which in (0, 1):
                np.testing.assert_array_equal(
                    found[first + 2 * channel + which],
                    given[first + channel + which * half],
                )


REFUSED = {
    "deepseek_v3": "deepseek_v3",
    "gemma3_text": "gemma3_text",
    "gpt_oss": "gpt_oss",
    "mistral_window": "mistral",
    "mixtral": "mixtral",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "phi3_long": "phi3",
    "smollm3": "smollm3",
    "bert": "bert",
    "roberta": "roberta",
}
KNOWN = "llama, qwen2, qwen3, qwen3_moe, gemma2, gpt2"


@pytest.mark.parametrize("family", REFUSED)
def test_families_without_an_architecture_are_refused(family, tmp_path):
    source, model, _ = golden_tensors(family)
    with config_error(
        f"--format='gguf' has no architecture for {REFUSED[family]!s}, the family of "
        f"this model; use --format=hf, or a model of {KNOWN}"
    ):
        write(tmp_path / "model.gguf", source, model)
    assert not (tmp_path / "model.gguf").exists()


def test_what_llama_cpp_computes_differently_is_refused(tmp_path):
    def refuse(family, text, **changes):
        source, model, _ = golden_tensors(family)
        with config_error(text):
            write(tmp_path / "x.gguf", source, dataclasses.replace(model, **changes))

    refuse(
        "gemma2",
        "query_pre_attn_scalar=9 is not the 6 of GGUF's gemma2 with this shape; use "
        "--format=hf",
    )
    refuse(
        "qwen3_moe",
        "norm_topk_prob=False is not the True of GGUF's qwen3moe; use --format=hf\n"
        "mlp_only_layers=[0] is not the [] of GGUF's qwen3moe; use --format=hf",
    )
    refuse(
        "llama",
        "model.positions.scaling='dynamic' is not linear, llama3 or plain yarn in "
        "GGUF's llama; use --format=hf",
        positions=schema.Rotary(
            max_positions=32,
            scaling=schema.DynamicRope(factor=2.0, original_length=32),
        ),
    )


HARD = {
    "random": np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32),
    "zeros": np.zeros((2, 32), np.float32),
    "one value": np.full((2, 32), -0.3, np.float32),
    "outlier": np.eye(2, 32, dtype=np.float32) * 1e4 + np.float32(0.01),
}
STEPS = {
    "q8_0": 1 / 254,
    "q4_0": 1 / 8,
    "q4_1": 1 / 15,
    "q5_0": 1 / 16,
    "q5_1": 1 / 31,
    "mxfp4": 1 / 3,
    "bf16": 2**-8,
    "f16": 2**-11,
    "f32": 0,
}
"""Largest errors over the largest weight of a block."""


@pytest.mark.parametrize("kind", gguf_file.TYPES)
@pytest.mark.parametrize("case", HARD)
def test_blocks_are_near(case, kind, tmp_path):
    """Of a file that is written, read by slices, and has a closed-form size."""
    name, array = "blk.0.ffn_up.weight", HARD[case]
    path = tmp_path / "model.gguf"
    gguf_file.write(path, "llama", {}, source_of(**{name: array}), kind)
    header = gguf_file.open_header(path)
    back = gguf_file.source_of(header)
    found = back.read_all(name)
    largest = np.abs(array.reshape(-1, 32)).max(1, keepdims=True)
    error = np.abs(found - array).reshape(-1, 32)
    assert (error <= largest * (STEPS[kind] + 2**-10) + 1e-7).all()
    index = slice(1, 2), slice(5, 21)
    np.testing.assert_array_equal(back.read(name, index), found[index])
    num_bits = {"q8_0": 8.5, "q4_0": 4.5, "q4_1": 5, "q5_0": 5.5, "q5_1": 6}
    num_bits |= {"mxfp4": 4.25, "bf16": 16, "f16": 16, "f32": 32}
    assert header.tensors[name].num_bytes == array.size * num_bits[kind] / 8


def test_the_file_is_hardly_larger_than_the_blocks(tmp_path):
    array = np.zeros((1024, 1024), np.float32)
    path = tmp_path / "model.gguf"
    gguf_file.write(path, "llama", {}, source_of(**{"blk.0.x.weight": array}), "q4_0")
    assert path.stat().st_size / (array.size * 4.5 / 8) < 1.005


def test_odd_widths_tables_and_norms_stay_plain():
    for name, shape, kind in (
        ("blk.0.ffn_up.weight", (64, 64), "q4_0"),
        ("blk.0.ffn_up.weight", (64, 48), "f16"),
        ("blk.0.ffn_up_exps.weight", (4, 64, 64), "q4_0"),
        ("blk.0.ffn_gate_inp.weight", (4, 64), "f32"),
        ("blk.0.ffn_norm.weight", (64,), "f32"),
        ("token_embd.weight", (64, 64), "f16"),
        ("output.weight", (64, 64), "f16"),
    ):
        assert gguf_file.type_of(name, shape, "q4_0") == kind
    assert gguf_file.type_of("output.weight", (64, 64), "bf16") == "bf16"


@pytest.mark.parametrize(("kind", "last"), [("q8_0", 127), ("q5_0", 15), ("q4_0", 7)])
def test_given_scales_recover_the_codes(kind, last, tmp_path):
    """Fails if blocks are rounded again: scales of float16 hold these exactly."""
    rng = np.random.default_rng(5)
    codes = rng.integers(-last, last + 1, (4, 64)).astype(np.float32)
    codes[0, :32] = 1  # no largest weight of the block is the last code
    factors = np.repeat(rng.integers(1, 9, (4, 2)), 32, 1).astype(np.float32) / 1024
    array = codes * factors
    blocks = gguf_file.blocks_of("w", array, kind, factors)
    found = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()])
    np.testing.assert_array_equal(found, array)


def test_scales_without_room_are_refused():
    array = np.ones((1, 32), np.float32)
    with checkpoint_error(
        "tensor='w' has given scales, which q4_1 has no room for; use q8_0, q4_0, q5_0"
    ):
        gguf_file.blocks_of("w", array, "q4_1", array)
    with checkpoint_error(
        "tensor='w' has a scale that float16 does not hold; use --format=hf"
    ):
        gguf_file.blocks_of("w", array * 1e-9, "q4_0", array * 1e-9)
    with checkpoint_error(
        "tensor='w' has values that are not finite in f16; use bf16 or f32"
    ):
        gguf_file.blocks_of("w", array * 1e6, "f16")


def llama3_model():
    """Settings of a Llama with the scaling of Llama 3.1."""
    scaling = schema.Llama3(factor=8.0, original_length=8_192)
    return dataclasses.replace(
        language.LLAMA,
        max_length=64,
        head_size=16,  # of which a channel is slowed by all of the factor
        positions=schema.Rotary(theta=5e5, max_positions=64, scaling=scaling),
    )


def test_the_scaling_of_llama_3_comes_back(tmp_path):
    model = llama3_model()
    path = write(tmp_path / "model.gguf", tensors_of(model), model)
    found = from_mapping(schema.Model, model_settings(path))
    assert found.positions == model.positions


def test_other_factors_are_refused(tmp_path):
    source, model, _ = golden_tensors("llama3")
    path = write(tmp_path / "model.gguf", source, model)
    with config_error(
        "tensor='rope_freqs.weight' has other factors than Llama 3.1; use another "
        "checkpoint"
    ):
        model_settings(path)


def tensors_of(model):
    """Tensors of Hugging Face with the weights of a small decoder."""
    kind = huggingface.find_kind(model)
    rng, arrays = np.random.default_rng(1), {}
    for tensor, (_, entry) in gguf_names.places_of(model, kind).items():
        mean = 1.0 if "norm" in tensor and kind != "gemma2" else 0.0
        values = mean + 0.3 * rng.normal(size=entry.shape)
        arrays[tensor] = values.astype(np.float32)
    return source_of(**arrays)


GEMMA = schema.Model(
    num_layers=3,
    embed_size=32,
    mlp_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    query_scale_size=8,
    vocab_size=61,
    max_length=32,
    norm="rms_norm",
    norm_eps=1e-6,
    norm_position="both",
    zero_centered_norm=True,
    scaled_embedding=True,
    activation="geglu",
    use_bias=False,
    positions=schema.Rotary(max_positions=32),
    attention_soft_cap=5.0,
    logit_soft_cap=3.0,
    window=schema.SlidingWindow(size=5, full_attention_every=2),
)
MIXTURE = dataclasses.replace(
    language.QWEN3,
    embed_size=32,
    head_size=8,
    vocab_size=61,
    positions=schema.Rotary(max_positions=32),
    moe=schema.TokenChoice(num_experts=4, top_k=2, expert_size=32, normalise=True),
)


@pytest.mark.parametrize("model", [GEMMA, MIXTURE], ids=["gemma2", "qwen3moe"])
def test_norms_from_zero_and_experts_come_back(model, tmp_path):
    source = tensors_of(model)
    back, _ = arrays_of_file(write(tmp_path / "model.gguf", source, model))
    path = write(tmp_path / "again.gguf", source, model, "bf16")
    for name, array in arrays_of_file(path)[0].items():
        np.testing.assert_allclose(array, back[name], atol=0.02)
    kind = huggingface.find_kind(model)
    plain = gguf_names.from_gguf(gguf_names.to_gguf(source, model, kind), model, kind)
    for name, array in read(source).items():
        np.testing.assert_allclose(plain.read_all(name), array, atol=1e-6)


def damaged(path, change):
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: x.__setitem__(slice(0, 4), b"GGML"), "it does not begin with GGUF"),
        (
            lambda x: x.__setitem__(slice(4, 8), struct.pack("<I", 9)),
            "its version is 9, and zjax reads 2 and 3",
        ),
        (
            lambda x: x.__setitem__(slice(8, 16), b"\xff" * 8),
            "it ends inside of the header, or the header is too long",
        ),
        (
            lambda x: x.__delitem__(slice(40, None)),
            "it ends inside of the header, or the header is too long",
        ),
        (
            lambda x: x.__delitem__(slice(len(x) - 64, None)),
            "it ends before 'blk.0.x.weight'",
        ),
    ],
)
def test_damaged_files_are_refused(change, problem, tmp_path):
    path = tmp_path / "model.gguf"
    array = np.ones((2, 64), np.float32)
    gguf_file.write(path, "llama", {}, source_of(**{"blk.0.x.weight": array}), "f32")
    damaged(path, change)
    with checkpoint_error(
        f"checkpoint.init_from={str(path)!r} is not a readable GGUF file ({problem}); "
        "give another GGUF file"
    ):
        gguf_file.open_header(path)


def test_a_length_beyond_the_file_takes_no_memory(tmp_path):
    """Fails, after all memory is gone, if counts are believed."""
    path = tmp_path / "model.gguf"
    path.write_bytes(
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"x"
        + struct.pack("<IIQ", 9, 0, 1 << 60)
    )
    with checkpoint_error(
        f"checkpoint.init_from={str(path)!r} is not a readable GGUF file (it has an "
        "array longer than the header); give another GGUF file"
    ):
        gguf_file.open_header(path)


def test_metadata_that_changes_outputs_is_refused(tmp_path):
    source, model, _ = golden_tensors("llama")
    tensors = gguf_names.to_gguf(source, model, "llama")
    path = tmp_path / "model.gguf"
    metadata = {"llama.attention.sliding_window": 5, "llama.block_count": 2}
    gguf_file.write(path, "llama", metadata, tensors, "f32")
    with config_error(
        f"llama.attention.sliding_window=5 of {path} is not supported: zjax does not "
        "compute it; use a checkpoint without it"
    ):
        model_settings(path)


def llama_cpp_logits(path, tokens):
    """Logits of llama.cpp for rows of tokens."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(
        str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False
    )
    found = []
    for row in tokens.tolist():
        model.reset()
        model.eval(row)
        found.append(np.array(model.scores[: len(row)]))
    return np.stack(found)


def differs(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("family", [*WRITTEN, "llama3"])
def test_llama_cpp_agrees_with_transformers(family, tmp_path):
    """llama.cpp stores keys and values in float16."""
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    source, model, _ = golden_tensors(family)
    path = write(tmp_path / "model.gguf", source, model)
    plain = golden.expected_of(family)
    assert differs(llama_cpp_logits(path, plain["tokens"]), plain["logits"]) < 1e-2


@pytest.mark.parametrize("model", [GEMMA, MIXTURE], ids=["gemma2", "qwen3moe"])
@pytest.mark.parametrize("quantize", ["f32", "q8_0", "q4_0", "q5_1", "mxfp4"])
def test_llama_cpp_agrees_with_what_comes_back(model, quantize, tmp_path):
    """llama.cpp rounds inputs of quantised matrices to 8 bits."""
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    path = write(tmp_path / "model.gguf", tensors_of(model), model, quantize)
    run = golden.start(golden.make_config("", directory=path))
    tokens = np.random.default_rng(2).integers(0, 61, (2, 12)).astype(np.int32)
    decoder = run.model.bind(run.state.master, {})
    expected = np.asarray(decoder(jnp.asarray(tokens)))
    found = llama_cpp_logits(path, tokens)
    if quantize == "f32":
        assert differs(found, expected) < 1e-2
    # Another expert may be chosen for a token whose scores are close.
    errors = np.abs(found - expected).max(-1) / np.abs(expected).max()
    assert np.median(errors) < 5e-2


def saved(directory):
    """A checkpoint of a run that has just started from a golden Llama."""
    run = golden.start(golden.make_config("llama"))
    save(directory, run.state, run)
    return Store(str(directory))


def test_a_run_is_exported_and_starts_another(tmp_path, caplog):
    store = saved(tmp_path / "run")
    path = tmp_path / "out" / "model.gguf"
    size = export_gguf(store, str(path), quantize="q8_0")
    assert size == path.stat().st_size
    assert [*path.parent.iterdir()] == [path]
    text = "\n".join(caplog.messages)
    assert "f16, as 32 does not divide their inputs: blk.0.attn_q.weight" in text
    assert "tokenizer: the export has none, and runs on token ids alone" in text
    run = golden.start(golden.make_config("llama", directory=path))
    text = "\n".join(caplog.messages)
    # Widths of 16 and 24 are no blocks; tables and heads are float16, too.
    assert f"init_from={str(path)!r} has tensors in F16 (16), F32 (5), which" in text
    plain = golden.expected_of("llama")
    decoder = run.model.bind(run.state.master, {})
    found = np.asarray(decoder(jnp.asarray(plain["tokens"])))
    assert 0 < differs(found, plain["logits"]) < 1e-2
    with config_error(
        "--dtype='bfloat16' has no effect with --format=gguf; use --quantize"
    ):
        export_gguf(store, str(path), dtype="bfloat16")


def test_bytes_are_a_vocabulary(tmp_path):
    """Fails if an id has another token, or unused rows have none."""
    write_bytes_tokenizer(tmp_path)
    record = load_tokenizer(tmp_path / "tokenizer.json").record
    found = vocabulary_of(tmp_path, record, 260)
    tokens, types = (
        found[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type")
    )
    assert (len(tokens), len(types)) == (260, 260)
    assert (tokens[65], tokens[32], tokens[256]) == ("A", "\u0120", "<|endoftext|>")
    assert (types[65], types[256], types[259]) == (1, 3, 5)
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.eos_token_id"] == 256
    assert found["tokenizer.ggml.add_bos_token"] is False


TEXTS = ["Hello world, it's 12345 o'clock!", "  two  spaces\n\nand lines ", "né 日本"]


def trained(folder, kind):
    """Tokenizer files of byte pairs, or of characters with bytes for others."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    text = pathlib.Path(gguf_names.__file__).read_text()
    special = ["<unk>", "</s>"]
    if kind == "sentencepiece":
        special += [f"<0x{x:02X}>" for x in range(256)]
        model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
        library = tokenizers.Tokenizer(model)
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special)
    else:
        library = tokenizers.Tokenizer(models.BPE())
        library.pre_tokenizer = SPLITS[kind]()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    library.train_from_iterator(text.splitlines(keepends=True), trainer)
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": "x"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return library


def _split(pattern):
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _digits():
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _bytes():
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


PATTERNS = {name: x for x, name in gguf_vocabulary.PATTERNS.items()}
SPLITS = {
    "gpt-2": _bytes,
    "smollm": _digits,
    "llama-bpe": lambda: _split(PATTERNS["llama-bpe"]),
    "qwen2": lambda: _split(PATTERNS["qwen2"]),
}


@pytest.mark.parametrize("kind", [*SPLITS, "sentencepiece"])
def test_llama_cpp_splits_texts_alike(kind, tmp_path):
    """Fails if the words, the merges or the scores are others."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    library = trained(tmp_path / "tokenizer", kind)
    record = load_tokenizer(tmp_path / "tokenizer" / "tokenizer.json").record
    metadata = vocabulary_of(tmp_path / "tokenizer", record, 0)
    path = tmp_path / "model.gguf"
    gguf_file.write(path, "llama", metadata, Source({}, lambda *_: None), "f32")
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in TEXTS:
        found = model.tokenize(text.encode(), add_bos=False)
        assert found == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", [*SPLITS, "sentencepiece"])
def test_vocabularies_have_the_names_of_llama_cpp(kind, tmp_path):
    library = trained(tmp_path / "tokenizer", kind)
    record = load_tokenizer(tmp_path / "tokenizer" / "tokenizer.json").record
    found = vocabulary_of(tmp_path / "tokenizer", record, 0)
    is_split = kind != "sentencepiece"
    assert found["tokenizer.ggml.pre"] == (kind if is_split else "default")
    assert found["tokenizer.ggml.tokens"] == [
        library.id_to_token(x) for x in range(library.get_vocab_size())
    ]
    assert found["tokenizer.chat_template"] == "x"
    assert ("tokenizer.ggml.scores" in found) != is_split


def test_other_tokenizers_are_refused(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    record = load_tokenizer(tmp_path / "tokenizer.json").record
    with data_error(
        f"tokenizer='{tmp_path}/tokenizer.json' splits texts by Whitespace, "
        "which llama.cpp does not; use --format=hf"
    ):
        vocabulary_of(tmp_path, record, 1)
