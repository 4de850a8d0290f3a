"""A trained model goes out as transformers wrote it, bit for bit."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy

from tests.support import huggingface as golden
from tests.support import language
from tests.support.refusals import checkpoint_error, data_error
from zjax.checkpoint.export import export_huggingface
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError, ConfigError
from zjax.huggingface import model_settings
from zjax.run.saving import save
from zjax.settings import schema
from zjax.settings.convert import from_mapping
from zjax.weights import files
from zjax.weights.huggingface import find_kind


def saved(directory, family, *overrides):
    """A checkpoint of a run that has just started from a golden one."""
    run = golden.start(golden.make_config(family, *overrides))
    save(directory, run.state, run)
    return Store(str(directory))


def read_all(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(file)
    return tensors


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("llama", (), id="llama"),
        pytest.param("llama_biases", (), id="biases"),
        pytest.param("llama3", (), id="scaled-rotations"),
        pytest.param("qwen2", (), id="qwen2"),
        pytest.param("qwen3", ("model.mlp_tiles=2",), id="qwen3-in-tiles"),
        pytest.param("phi3", (), id="joined-inputs"),
        pytest.param("phi3_long", (), id="longrope"),
        pytest.param("olmo2", (), id="olmo2"),
        pytest.param("smollm3", (), id="layers-without-rotation"),
        pytest.param("mistral_window", (), id="mistral"),
        pytest.param("gemma2", (), id="gemma2"),
        pytest.param("gemma3_text", (), id="gemma3"),
        pytest.param("gpt2", (), id="gpt2"),
        pytest.param("mixtral", ("model.layers_per_scan=1",), id="mixtral"),
        pytest.param("gpt_oss", (), id="joined-experts"),
        pytest.param("qwen3_moe", (), id="experts-behind-dense-layers"),
        pytest.param("deepseek_v3", (), id="latents"),
        pytest.param("deepseek_v3_whole_queries", (), id="whole-queries"),
        pytest.param("bert", (), id="bert"),
        pytest.param("roberta", (), id="roberta"),
    ],
)
def test_what_came_in_goes_out_bit_for_bit(family, overrides, tmp_path):
    store = saved(tmp_path / "run", family, *overrides)
    folder = tmp_path / "out"
    size = export_huggingface(store, str(folder), max_shard_bytes=12_000)
    expected, found = read_all(golden.FOLDER / family), read_all(folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    assert size == sum(file.stat().st_size for file in folder.iterdir())
    read, given = (
        from_mapping(schema.Model, x)
        for x in (model_settings(folder), golden.settings_of(family))
    )
    assert read == given
    written = json.loads((folder / "config.json").read_text())
    original = json.loads((golden.FOLDER / family / "config.json").read_text())
    for name in ("architectures", "bos_token_id", "eos_token_id"):
        assert written[name] == original[name]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in expected.values())
    assert sorted({*index["weight_map"].values()}) == sorted(
        file.name for file in folder.glob("*.safetensors")
    )
    if family == "llama":  # all others have tensors and settings of their beginning
        run = golden.start(golden.make_config(family, directory=folder))
        table = expected["model.embed_tokens.weight"]
        np.testing.assert_array_equal(run.state.master["embedding"]["tokens"], table)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("run"), "mistral")


def test_a_small_model_is_one_file_in_the_dtype_that_was_asked_for(store, tmp_path):
    """Of a Mistral, which without a window is a Llama."""
    export_huggingface(store, str(tmp_path / "out"), dtype="bfloat16")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert {str(x.dtype) for x in read_all(tmp_path / "out").values()} == {"bfloat16"}
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["model_type"], values["dtype"]) == ("llama", "bfloat16")


def test_the_tokenizer_goes_along_with_its_ids(tmp_path, caplog):
    """Fails if files stay behind, or others than those of a tokenizer come."""
    golden.copy("mistral", tmp_path / "start", eos_token_id=[2, 7], pad_token_id=0)
    texts = {"tokenizer.json": "{}", "chat_template.jinja": "x", "notes.txt": "mine"}
    for name, text in texts.items():
        (tmp_path / "start" / name).write_text(text)
    run = golden.start(golden.make_config("mistral", directory=tmp_path / "start"))
    save(tmp_path / "run", run.state, run)
    given, folder = Store(str(tmp_path / "run")), tmp_path / "out"
    export_huggingface(given, str(folder))
    assert sorted(file.name for file in folder.iterdir()) == [
        *("chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json")
    ]
    assert (folder / "chat_template.jinja").read_text() == "x"
    values = json.loads((folder / "config.json").read_text())
    assert (values["eos_token_id"], values["pad_token_id"]) == ([2, 7], 0)
    assert caplog.messages[-1] == (
        f"tokenizer: tokenizer.json, chat_template.jinja of {tmp_path / 'start'}"
    )
    (tmp_path / "start" / "vocab.json").mkdir()
    with data_error(
        f"tokenizer='{tmp_path / 'start' / 'vocab.json'}' is not a file; move it away"
    ):
        export_huggingface(given, str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()


def test_the_tokenizer_is_that_of_the_run_that_this_one_began_with(tmp_path, caplog):
    """Fails if only the checkpoint beside the run is looked at, or nothing is told."""
    start = tmp_path / "start"
    golden.copy("mistral", start, eos_token_id=7)
    (start / "tokenizer.json").write_text("{}")
    config = golden.make_config("mistral", directory=start)
    for before, name in ((start, "first"), (tmp_path / "first", "second")):
        beginning = dataclasses.replace(config.checkpoint, init_from=str(before))
        run = golden.start(dataclasses.replace(config, checkpoint=beginning))
        save(tmp_path / name, run.state, run)
    given = Store(str(tmp_path / "second"))
    export_huggingface(given, str(tmp_path / "out"))
    assert (tmp_path / "out" / "tokenizer.json").exists()
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["eos_token_id"] == 7
    start.rename(tmp_path / "moved")
    export_huggingface(given, str(tmp_path / "again"))
    assert caplog.messages[-1] == (
        f"tokenizer: checkpoint.init_from='{start}' has no config.json; its files do "
        "not go along"
    )


def test_a_directory_with_files_is_left_alone(store, tmp_path):
    (tmp_path / "mine").write_text("")
    with checkpoint_error(
        f"output='{tmp_path}' exists and is not empty; name a new directory"
    ):
        export_huggingface(store, str(tmp_path))


def test_a_failed_export_leaves_nothing(store, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export_huggingface(store, str(tmp_path / "out"))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("shape", "lines"),
    [
        (
            dataclasses.replace(language.GPT, query_key_norm=True),
            ["model.query_key_norm=True is False in gpt2"],
        ),
        (
            dataclasses.replace(
                language.LLAMA,
                attention=schema.Sparse(),
                moe=schema.TokenChoice(num_experts=2),
            ),
            [
                "model.moe.top_k=1 is 2 in mixtral",
                "model.attention='sparse' is 'dense' in mixtral",
            ],
        ),
        (
            dataclasses.replace(
                language.LLAMA,
                attention_bias="inputs",
                positions=schema.Rotary(
                    size=2,
                    scaling=schema.DynamicRope(factor=2.0, original_length=8),
                ),
            ),
            [
                "model.positions.scaling.original_length=8 is 16 in qwen2",
                "model.positions.size=2 is 0 in qwen2",
            ],
        ),
        (
            from_mapping(
                schema.Model, golden.settings_of("bert") | {"num_token_types": 0}
            ),
            ["model.num_token_types=0 is 1 in bert"],
        ),
    ],
    ids=["gpt2", "llama", "qwen2", "bert"],
)
def test_a_model_of_no_family_is_refused_by_setting(shape, lines):
    with pytest.raises(ConfigError) as error:
        find_kind(shape)
    assert str(error.value).splitlines() == [
        f"{line}; leave out --format=hf" for line in lines
    ]
