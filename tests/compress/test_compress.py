"""Compression of whole decoders: losses, resumption, experts, files and refusals."""

import dataclasses
import fcntl
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.command_line import typed
from tests.support.huggingface import FOLDER, make_config, start
from zjax.checkpoint.contents import digest_step
from zjax.checkpoint.start import open_weights, settings_of_weights
from zjax.checkpoint.store import Store
from zjax.checkpoint.tokenizer import CheckpointTokenizer, write_tokenizer
from zjax.cli import compressing as commands
from zjax.cli.compressing import compress, read_recipe, run_settings
from zjax.cli.planning import plan
from zjax.compress import compress as compressing
from zjax.compress.compress import compress_weights, read_rows
from zjax.compress.files import layout_of
from zjax.compress.notes import describe_layers
from zjax.compress.opened import open_huggingface, open_run
from zjax.compress.partial import CONTENTS, PartialOutput, directory_of
from zjax.compress.parts import places_of
from zjax.compress.plan import report_recipes
from zjax.compress.sizes import sizes_of
from zjax.compress.walk import AFTER, BEFORE, NEAREST, Walk
from zjax.config.flags import changes_given
from zjax.config.load import load_config
from zjax.data.source import SyntheticRows
from zjax.errors import CheckpointError, ConfigError, ProcessError
from zjax.generation.loading import WITHOUT_MOMENTS
from zjax.models.build import make_model
from zjax.models.recording import Recorder, recording_stack
from zjax.models.rounded import linear_layers
from zjax.models.stack import make_stack
from zjax.run.saving import save
from zjax.settings.compress import RECIPES, Smoothquant
from zjax.stack.forward import run_stack
from zjax.weights.compressed_tensors import unpack
from zjax.weights.files import num_bytes, open_files
from zjax.weights.source import Source

DATA = {
    "data": {"source": "synthetic", "length": 16},
    "precision.compute_dtype": "float32",
}


def open_family(family, method="gptq", weights="int4", **changes):
    """Opens a golden checkpoint, with groups of 8 inputs and few rows."""
    rule = {"weights": weights, "group_size": 8}
    settings = {"method": method, "rules": [rule], "num_rows": 32}
    settings |= {"num_heldout_rows": 8, "expert_tokens": 8} | changes
    start = settings_of_weights(str(FOLDER / family)) | WITHOUT_MOMENTS
    config = load_config({}, start, DATA, {"compress": settings})
    return open_huggingface(config)


def tokenizer_of(family):
    return CheckpointTokenizer(None, FOLDER / family), FOLDER / family


def walk_of(opened):
    """Makes a walk with the rows that the settings name."""
    settings = opened.config.compress
    rows, heldout = read_rows(opened.config, settings)
    return Walk(opened, settings, rows, heldout), heldout


def test_losses_before_are_those_of_the_model(tmp_path):
    opened = open_family("llama", "nearest")
    walk, heldout = walk_of(opened)
    scores = walk.run(PartialOutput(str(tmp_path / "out"), {})).scores
    config = dataclasses.replace(opened.config, compress=None)
    model = make_model(config)
    params = opened.read_outside()
    blocks = [opened.read_block("", x.number) for x in places_of(opened.decoder)]
    params["blocks"] = stacked(blocks)
    losses = [
        float(model.loss(params, {}, jax.tree.map(jnp.asarray, x), None).value)
        for x in heldout
    ]
    assert scores[BEFORE].loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert scores[BEFORE].agreement == 1.0
    assert scores[AFTER].loss != scores[BEFORE].loss
    assert scores[AFTER].agreement < 1.0


def test_products_of_training_in_float8_are_none_of_the_files():
    """Fails if statistics and losses round weights that the files do not."""
    config = load_config(
        open_family("llama").config, {"precision.matmul_dtype": "float8"}
    )
    opened = open_huggingface(config)
    layers = linear_layers(opened.decoder).values()
    assert {layer.matmul_dtype for layer in layers} == {"compute"}
    assert opened.config.precision.compute_dtype == "float32"


def stacked(blocks):
    """Stacks the blocks of a model to a tree."""
    tree = {}
    for path in blocks[0]:
        node, (*folders, name) = tree, path.split("/")
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = jnp.stack([block[path] for block in blocks])
    return tree


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """A Llama compressed by GPTQ through the function that the command calls."""
    opened, folder = open_family("llama", num_rows=128), tmp_path_factory.mktemp("a")
    output, told = folder / "small", []
    tokenizer = tokenizer_of("llama")
    done = compress_weights(opened, str(output), tokenizer, report=told.append)
    return opened, output, done, told


def test_gptq_writes_codes_that_read_back_as_its_weights(compressed):
    _, output, done, told = compressed
    config = json.loads((output / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"]) == (4, 8)
    names = open_files("", output).entries
    assert "model.layers.1.self_attn.q_proj.weight_packed" in names
    assert names["lm_head.weight"].dtype == "float32"
    # Read as zjax reads any checkpoint, the loss is that of the table.
    start = settings_of_weights(str(output)) | WITHOUT_MOMENTS
    method = {"method": "nearest", "num_heldout_rows": 8}
    again = open_huggingface(load_config({}, start, DATA, {"compress": method}))
    found, scores = walk_of(again), None
    scores = found[0].run(PartialOutput(str(output.parent / "b"), {})).scores
    assert scores[BEFORE].loss == pytest.approx(done.found[AFTER].score.loss, rel=1e-5)
    assert not [x for x in output.parent.iterdir() if x.name.endswith("small.blocks")]
    assert told == []


def test_the_table_fits_a_terminal_and_names_all_weights(compressed):
    _, output, done, _ = compressed
    assert max(map(len, done.text.splitlines())) <= 80
    assert [*done.found] == [BEFORE, NEAREST, AFTER]
    assert "of 128 held-out tokens" in done.text
    assert (output / "size_and_loss.png").stat().st_size > 5_000
    before, after = (done.found[x].sizes.total for x in (BEFORE, AFTER))
    assert after < before / 2
    assert done.num_bytes > after


def data_bytes(output):
    """Bytes of the tensors of a directory, from the headers of the files."""
    size = 0
    for path in output.glob("*.safetensors"):
        with path.open("rb") as file:
            size += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return size


def test_the_table_has_the_bytes_of_the_files(compressed):
    _, output, done, _ = compressed
    assert done.found[AFTER].sizes.total == data_bytes(output)
    assert done.found[BEFORE].sizes.total == data_bytes(FOLDER / "llama")


def test_layers_that_go_out_as_numbers_count_as_numbers_and_are_named(tmp_path):
    """Fails if codes that no file holds are counted, or a rule is dropped silently."""
    rule = {"pattern": "blocks(?!/mlp/up)", "activations": "int8", "group_size": 16}
    rules = [rule | {"weights": "int8"}]
    opened = open_family("llama", "nearest", rules=rules, num_heldout_rows=1)
    output, told = tmp_path / "out", []
    tokenizer = tokenizer_of("llama")
    done = compress_weights(opened, str(output), tokenizer, report=told.append)
    assert told == []
    assert done.found[AFTER].sizes.total == data_bytes(output)
    entries = open_files("", output).entries
    names = {x.split("layers.0.")[1] for x in entries if "layers.0." in x}
    kinds = {x.removesuffix("_scale") for x in names if x.endswith("_scale")}
    assert kinds == {
        *(f"self_attn.{x}_proj.weight" for x in "qkv"),
        "mlp.gate_proj.weight",
    }
    assert "mlp.up_proj.weight" in names and "mlp.down_proj.weight" in names
    assert done.text.splitlines()[-4:] == [
        "float32 in the files, as groups of 16 do not divide the inputs:",
        "  blocks/attention/out, blocks/mlp/down",
        "inputs are not rounded, in the files or the losses: blocks/attention/out,",
        "  blocks/mlp/down",
    ]


def test_losses_without_codes_are_those_of_the_files(tmp_path):
    """Fails if the table rounds activations that no reader of the files rounds."""
    rules = [{"weights": "int3", "group_size": 8, "activations": "int8"}]
    opened = open_family("llama", "nearest", rules=rules)
    output, told = tmp_path / "out", []
    tokenizer = tokenizer_of("llama")
    done = compress_weights(opened, str(output), tokenizer, report=told.append)
    assert told == [
        "weights go out in float32, on the grid of codes: compressed-tensors has no "
        "such codes for all rules"
    ]
    assert "inputs are not rounded, in the files or the losses: " in done.text
    assert done.found[AFTER].sizes.total == data_bytes(output)
    start = settings_of_weights(str(output)) | WITHOUT_MOMENTS
    settings = {"method": "nearest", "num_heldout_rows": 8}
    again = open_huggingface(load_config({}, start, DATA, {"compress": settings}))
    found = walk_of(again)[0].run(PartialOutput(str(tmp_path / "b"), {})).scores
    assert found[BEFORE].loss == pytest.approx(done.found[AFTER].score.loss, rel=1e-6)


def test_gptq_changes_hidden_states_less_than_rounding_to_nearest(tmp_path):
    opened = open_family("llama", weights="int3", num_rows=64)
    walk, _ = walk_of(opened)
    walk._heldout = walk._calibration
    walk.run(PartialOutput(str(tmp_path / "out"), {}))
    before, nearest, after = (
        np.concatenate(walk._streams[name]) for name in (BEFORE, NEAREST, AFTER)
    )
    errors = [np.square(x - before).sum() for x in (nearest, after)]
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize(
    "family", ["llama_biases", pytest.param("gemma2", marks=pytest.mark.slow)]
)
def test_factors_that_are_folded_change_no_output(family, tmp_path, monkeypatch):
    # Without rounding, AWQ only moves factors between layers.
    monkeypatch.setattr("zjax.compress.block.round_matrix", unrounded)
    opened = open_family(family, "awq", weights="int3", num_heldout_rows=4)
    walk, _ = walk_of(opened)
    output = PartialOutput(str(tmp_path / "out"), {})
    scores = walk.run(output).scores
    assert scores[AFTER].loss == pytest.approx(scores[BEFORE].loss, abs=2e-5)
    place, block = places_of(opened.decoder)[0], output.read(0)
    assert block is not None
    after, _ = block
    before = opened.read_block(place.name, place.number)
    moved = [path for path, x in before.items() if not np.allclose(x, after[path])]
    endings = "attention_norm/scale", "attention/value/kernel"
    assert all(any(path.endswith(x) for path in moved) for x in endings)


def unrounded(kernel, grid, method, found):
    from zjax.compress.grid import Rounded

    return Rounded(kernel, grid.scales(kernel))


@pytest.fixture(scope="module")
def mixture():
    return open_family("mixtral", num_rows=8, expert_tokens=60)


def test_experts_with_few_tokens_are_named(mixture, tmp_path):
    walk, _ = walk_of(mixture)
    outcome = walk.run(PartialOutput(str(tmp_path / "out"), {}))
    assert outcome.notes
    pattern = r"blocks/mlp\[\d\]: rounded to nearest, below 60 tokens: experts \d"
    assert all(re.match(pattern, note) for note in outcome.notes)
    assert np.isfinite(outcome.scores[AFTER].loss)


def test_each_expert_is_rounded_by_its_own_tokens(mixture, monkeypatch):
    from zjax.compress import experts

    seen = {}

    def record(params, mixture, number, tokens):
        seen[number] = tokens
        return None, None

    monkeypatch.setattr(experts, "_statistics_of", record)
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(64, 16)).astype(np.float32)
    chosen = rng.integers(1, 4, size=(64, 2)).astype(np.int32)
    parts = walk_of(mixture)[0]._parts_of(places_of(mixture.decoder)[0])
    block = mixture.read_block("", 0)
    given = experts.Routed(tokens, chosen)
    method = mixture.config.compress.method
    rounded, few = experts.round_experts(block, parts.mixtures[0], method, given, 1)
    # Expert 0 saw nothing, and is there all the same.
    assert few == {0: 0}
    for number, found in seen.items():
        np.testing.assert_array_equal(found, tokens[(chosen == number).any(1)])
    assert np.isfinite(rounded.params[parts.mixtures[0].up.kernel]).all()


def test_compression_goes_on_where_it_stopped(tmp_path):
    opened, output = open_family("llama"), str(tmp_path / "out")

    with pytest.raises(Stop):
        compress_weights(opened, output, tokenizer_of("llama"), advance=stop)
    told, rounded = [], []
    compress_block = Walk._compress

    def record(self, place, params):
        rounded.append(place.number)
        return compress_block(self, place, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Walk, "_compress", record)
        tokenizer = tokenizer_of("llama")
        resumed = compress_weights(opened, output, tokenizer, report=told.append)
    assert rounded == [1]
    assert told == ["goes on after 1 blocks of an earlier call"]
    whole = compress_weights(opened, str(tmp_path / "b"), tokenizer)
    assert resumed.found == whole.found


def test_blocks_of_another_recipe_or_damaged_ones_are_not_taken(tmp_path):
    first = PartialOutput(str(tmp_path / "out"), {"recipe": "a", "weights": "w"})
    first.write(0, {"a/kernel": jnp.ones((2, 3))}, {"a/kernel": jnp.ones((1, 3))}, [])
    same = PartialOutput(str(tmp_path / "out"), {"recipe": "a", "weights": "w"})
    block = same.read(0)
    assert block is not None
    np.testing.assert_array_equal(block[0]["a/kernel"], np.ones((2, 3)))
    file = same.directory / "block-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert same.read(0) is None
    with pytest.raises(ConfigError) as error:
        PartialOutput(str(tmp_path / "out"), {"recipe": "b", "weights": "w"})
    assert str(error.value) == (
        f"--output='{tmp_path}/out' has 1 blocks of an earlier call, and recipe differ;"
        f" remove {same.directory} to begin anew, or name another output"
    )
    assert file.exists()
    assert PartialOutput(str(tmp_path / "out"), same._origin).num_blocks == 1


class Stop(Exception):
    """Stops a compression."""


def stop(*_):
    raise Stop


@pytest.mark.parametrize("keeps_times", [False, True])
def test_changed_weights_at_the_same_path_begin_anew(
    tmp_path, monkeypatch, keeps_times
):
    folder, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(FOLDER / "llama", folder)
    start = settings_of_weights(str(folder)) | WITHOUT_MOMENTS
    settings = {"method": "nearest", "rules": [{"group_size": 8}]}
    config = load_config({}, start, DATA, {"compress": settings})
    monkeypatch.setattr(Walk, "run", write_first)

    def call():
        told, tokenizer = [], CheckpointTokenizer(None, folder)
        given = open_huggingface(config), str(output), (tokenizer, folder)
        with pytest.raises(Stop):
            compress_weights(*given, report=told.append)
        return told

    assert call() == []
    assert call() == ["goes on after 1 blocks of an earlier call"]
    files = sorted(folder.glob("*.safetensors"))
    # The last file holds nothing of the first block.
    for path in files if keeps_times else files[-1:]:
        status, content = path.stat(), bytearray(path.read_bytes())
        content[-3] ^= 1
        if keeps_times:  # some of the tensors are of the first block
            content[-2000::4] = bytes(x ^ 1 for x in content[-2000::4])
        path.write_bytes(content)
        if keeps_times:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert call() == [f"begins anew: {CONTENTS} changed"]


def write_first(self, output, advance):
    """Writes a first block, and stops."""
    output.write(0, {"a/kernel": jnp.ones((2, 3))}, {}, [])
    raise Stop


def test_a_saved_step_is_known_by_its_checksums(tmp_path):
    assert digest_step(tmp_path) == digest_step(tmp_path)
    found = {digest_step(tmp_path)}
    for text in "a", "b":
        (tmp_path / "params").write_text(text)
        found.add(digest_step(tmp_path))
    for text in "1", "2":
        (tmp_path / "sums").write_text(text)
        found.add(digest_step(tmp_path))
    assert len(found) == 5


def test_folders_of_others_are_refused_and_kept(tmp_path):
    opened, output = open_family("llama", "nearest"), tmp_path / "out"
    folder = directory_of(str(output))
    folder.mkdir()
    (folder / "mine").touch()
    for index in None, "{}":
        if index:
            (folder / "progress.json").write_text(index)
        with pytest.raises(ConfigError) as error:
            compress_weights(opened, str(output), tokenizer_of("llama"))
        assert str(error.value) == (
            f"--output='{output}' keeps blocks in {folder}, which has no index of "
            "blocks; remove that directory, or name another output"
        )
    assert {x.name for x in folder.iterdir()} == {"mine", "progress.json"}


@pytest.mark.parametrize("output", [".", "..", "/"])
def test_outputs_without_a_name_are_refused(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        compress_weights(open_family("llama", "nearest"), output, tokenizer_of("llama"))
    assert str(error.value) == (
        f"--output='{output}' is no name of a new directory; name a new directory"
    )


def test_a_second_call_with_an_output_is_refused(tmp_path):
    output = str(tmp_path / "out")
    folder = directory_of(output)
    folder.mkdir()
    with (folder / "lock.json").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ProcessError, match="is in use by another run"):
            compress_weights(
                open_family("llama", "nearest"), output, tokenizer_of("llama")
            )


def test_a_failing_picture_costs_no_blocks(compressed, monkeypatch):
    opened, output, done, _ = compressed
    again = output.parent / "again"
    tokenizer = tokenizer_of("llama")
    with monkeypatch.context() as patch:
        patch.setattr(compressing, "plot_scores", stop)
        with pytest.raises(Stop):
            compress_weights(opened, str(again), tokenizer)
    assert not again.exists()
    told = []
    found = compress_weights(opened, str(again), tokenizer, report=told.append)
    assert told == ["goes on after 2 blocks of an earlier call"]
    assert found.text == done.text
    assert not directory_of(str(again)).exists()


def test_all_problems_are_told_before_anything_is_computed(tmp_path, monkeypatch):
    rules = [{"pattern": "nothing"}, {"weights": "compute"}]
    opened = open_family("llama", "smoothquant", rules=rules, num_rows=4)
    monkeypatch.setattr(SyntheticRows, "__len__", lambda _: 3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    monkeypatch.setattr(compressing, "Walk", None)
    with pytest.raises(ConfigError) as error:
        compress_weights(opened, str(tmp_path / "out"), tokenizer_of("llama"))
    text = str(error.value)
    assert (
        "compress.rules[0].pattern='nothing' matches no linear layer; layers look like "
        "blocks/attention/key, blocks/attention/out, blocks/attention/query"
    ) in text
    assert "compress.rules=2 round no weights; give a rule with weights such" in text
    assert (
        "compress.method='smoothquant' moves outliers of activations, but no rule "
        "rounds activations; set activations of a rule, or use gptq or awq"
    ) in text
    rows = "is more than the 3 rows of the train data; use 3 or fewer"
    assert f"compress.num_rows=4 {rows}" in text
    assert f"--output='{tmp_path}/out' exists and is not empty; name a new" in text


def test_rules_without_meaning_are_refused():
    rules = [{"pattern": "("}, {"weights": "mxfp4", "group_size": 128}]
    found = compressing.problems_of(*opened_with(rules), "out")
    assert [str(x) for x in found] == [
        "compress.rules[0].pattern='(' is not a regular expression: missing ), "
        "unterminated subpattern at position 0; correct it, or escape characters "
        "with \\",
        "compress.rules[1].group_size=128 is no group of weights='mxfp4'; use 32",
    ]


def test_numbers_out_of_range_and_groups_of_one_are_refused(monkeypatch):
    """Fails if a recipe rounds by numbers that no run takes."""
    changes = {"num_rows": 0, "method": {"kind": "gptq", "damp": -1.0}}
    opened = open_family("llama", rules=[{"group_size": -1}], **changes)
    found = compressing.problems_of(opened, opened.config.compress, "out")
    assert [str(x) for x in found] == [
        "compress.rules[0].group_size=-1 is out of range; use 0 or more",
        "compress.method.damp=-1.0 is out of range; use more than 0",
        "compress.num_rows=0 is out of range; use 1 or more",
    ]
    monkeypatch.setattr(compressing, "inputs_of", lambda _: {"blocks/mlp/up": 23})
    found = compressing.problems_of(*opened_with([{"group_size": 5}]), "out")
    assert [str(x) for x in found] == [
        "compress.rules[0].group_size=5 lets none of the 23 inputs of blocks/mlp/up "
        "share a scale; use 23, or 0 for one scale of all inputs"
    ]


def times(opened, factor, wanted):
    """Multiplies the weights whose name begins with some text."""
    source = opened.source

    def read(name, index):
        values = source.read(name, index)
        return values * np.float32(factor) if name.startswith(wanted) else values

    return dataclasses.replace(opened, source=Source(source.entries, read))


@pytest.mark.parametrize("name", ["blocks.mlp.down.kernel[0]", "head", "embedding"])
def test_weights_that_are_not_finite_are_refused_by_name(name, tmp_path):
    """Fails if hours of calibration end in weights that no code stands for."""
    opened = open_family("llama", "nearest", num_heldout_rows=1)
    walk, _ = walk_of(times(opened, np.nan, name))
    with pytest.raises(CheckpointError) as error:
        walk.run(PartialOutput(str(tmp_path / "out"), {}))
    assert all(
        str(problem).startswith(f"tensor='{name.replace('.', '/')}")
        and str(problem).endswith(
            "' is not finite everywhere in float32; compress another checkpoint"
        )
        for problem in error.value.problems
    )


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_inputs_too_large_for_the_dtype_are_refused(method, tmp_path):
    """Fails if statistics of infinite inputs become weights that are kept."""
    opened = times(open_family("llama", method), 1e4, "blocks.mlp.up")
    config = load_config(opened.config, {"precision.compute_dtype": "float16"})
    walk, _ = walk_of(dataclasses.replace(opened, config=config))
    output = PartialOutput(str(tmp_path / "out"), {})
    with pytest.raises(ConfigError) as error:
        walk.run(output)
    assert str(error.value) == (
        "precision.compute_dtype='float16' does not hold what enters "
        "blocks/mlp/down/kernel[0]; use bfloat16 or float32"
    )
    assert not output.num_blocks


def test_activations_of_experts_are_refused():
    rules = [{"weights": "int8", "group_size": 4, "activations": "int8"}]
    opened = open_family("mixtral", "nearest", rules=rules)
    found = compressing.problems_of(opened, opened.config.compress, "out")
    assert [str(x) for x in found] == [
        "compress.rules[0].activations='int8' is not honoured for the experts of "
        "blocks/mlp/experts/up; give experts a rule of their own, before this one"
    ]


def test_an_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    output = str(tmp_path / "file" / "out")
    found = compressing.problems_of(*opened_with([{"group_size": 8}]), output)
    assert [str(x) for x in found] == [
        f"--output='{output}' lies below {tmp_path}/file, a file; name a new directory"
    ]


def test_data_of_other_tokens_is_refused(tmp_path):
    """Fails if bytes calibrate a checkpoint with a tokenizer of its own."""
    with pytest.raises(ConfigError) as error:
        compress(typed("compress", f"--model={FOLDER / 'llama'}", "--output=out"))
    assert str(error.value) == (
        "data.source='standard_library' has 257 tokens, which are not the 61 of "
        "--model; give texts by data.source=tokens, of `zjax data prepare`"
    )


def opened_with(rules):
    """A model with rules, and the settings of its compression."""
    opened = open_family("llama", "nearest", rules=rules)
    return opened, opened.config.compress


def test_recording_leaves_the_programs_of_training_as_they_are():
    opened = open_family("llama")
    batch = {"tokens": jax.ShapeDtypeStruct((1, 16), jnp.int32)}
    params = jax.eval_shape(make_model(opened.config).init, jax.random.key(0))[0]

    def trace():
        stack = make_stack(opened.decoder)
        return jax.make_jaxpr(lambda p, b: run_stack(stack, p, b, None)[0])(
            params, batch
        )

    before = str(trace())
    recording_stack(opened.decoder, Recorder())
    assert str(trace()) == before


def test_the_command_takes_recipes_and_changes(tmp_path, capsys, monkeypatch):
    told = {}

    def record(opened, output, tokenizer, **given):
        told["settings"] = opened.config.compress
        return compressing.Compressed("table", {}, 5)

    monkeypatch.setattr("zjax.cli.compressing.compress_weights", record)
    words = (
        f"--model={FOLDER / 'llama'}",
        "--recipe=w4a16_awq",
        f"--output={tmp_path / 'out'}",
        "--config.compress.num_rows=7",
        "--config.data.source=synthetic",
    )
    compress(typed("compress", *words))
    assert (told["settings"].method.kind, told["settings"].num_rows) == ("awq", 7)
    shown = capsys.readouterr().out
    assert "next: zjax generate --model=" in shown and "5 bytes" in shown
    asked = []
    monkeypatch.setattr(
        commands, "open_weights", lambda _, x: asked.append(x) or stop()
    )
    for recipe in ["--recipe=w8a16"], []:
        with pytest.raises(Stop):
            compress(typed("compress", *recipe, f"--output={tmp_path}"))
    assert asked == [RECIPES["w8a16"], None]
    monkeypatch.undo()
    (tmp_path / "r.json").write_text('{"method": "nearest"}')
    assert read_recipe(str(tmp_path / "r.json")) == {"method": "nearest"}
    with pytest.raises(ConfigError, match="--recipe='w3' is no recipe; use w4a16_gptq"):
        read_recipe("w3")
    with pytest.raises(ConfigError, match="needs one of --run and --model"):
        compress(typed("compress", f"--output={tmp_path}"))


def test_a_run_keeps_the_recipe_that_it_has(monkeypatch, capsys):
    own = {"method": "awq", "num_rows": 7}
    saved = [load_config({}, {"compress": own}), load_config({})]

    def settings(given):
        return load_config(saved[0], *changes_given(given))

    monkeypatch.setattr(commands.commands, "settings", settings)
    given = typed("compress", "--run=r", "--config.compress.num_heldout_rows=3")

    def chosen(recipe):
        found = run_settings(given, recipe).compress
        assert found.num_heldout_rows == 3
        return found.method.kind, found.num_rows

    assert chosen(None) == ("awq", 7)
    assert capsys.readouterr().err == "recipe: the section compress of the settings\n"
    assert chosen({"method": "nearest"}) == ("nearest", 128)
    assert chosen({}) == ("gptq", 128)
    saved.pop(0)
    assert chosen(None) == ("gptq", 128)


def test_a_gguf_file_takes_the_tokenizer_beside_it(tmp_path, monkeypatch):
    opened, seen, out = open_family("llama"), [], tmp_path / "out"

    def record(config):
        seen.append(config)
        return opened

    monkeypatch.setattr(commands, "settings_of_weights", lambda _: {})
    monkeypatch.setattr(commands, "open_huggingface", record)
    (tmp_path / "x.gguf").touch()
    (tmp_path / "tokenizer.json").write_text("{}")
    out.mkdir()
    given = typed("compress", f"--model={tmp_path / 'x.gguf'}", "--output=small")
    _, tokenizer = commands.open_weights(given, None)
    assert seen[0].compress.method.kind == "gptq"
    write_tokenizer(out, *tokenizer)
    assert (out / "tokenizer.json").read_text() == "{}"


def test_a_run_that_learned_rounded_matrices_keeps_the_codes(tmp_path):
    """Fails if master weights are compressed, or a code changes in sixteen bits."""
    rule = {"weights": "int4", "group_size": 8}
    changes = "precision.compute_dtype=bfloat16", f"quantize.rules=[{rule}]"
    config = make_config("llama", *changes, f"directory={tmp_path}")
    run = start(config)
    save(tmp_path / "checkpoints", run.state, run)
    settings = {"rules": [rule], "method": "nearest", "num_heldout_rows": 1}
    config = load_config(config, {"data.length": 16, "compress": settings})
    opened, _ = open_run(config, "auto", 0)
    output, told = tmp_path / "out", []
    tokenizer = tokenizer_of("llama")
    done = compress_weights(opened, str(output), tokenizer, report=told.append)
    assert told == ["the weights have the values that training rounded them to"]
    assert "rounded once more" not in done.text
    learned, _ = open_weights(Store(str(tmp_path / "checkpoints")), rounds=True)
    kernel = learned.read_all("blocks/mlp/down/kernel")[1].T
    files = open_files("", output)
    name = "model.layers.1.mlp.down_proj.weight"
    codes = unpack(files.read_all(f"{name}_packed"), 4, kernel.shape[1])
    scales = np.float32(files.read_all(f"{name}_scale"))
    found = np.float32(codes) * np.repeat(scales, 8, axis=1)
    np.testing.assert_array_equal(found, kernel)
    # Another grid, or factors of inputs, round the values once more.
    method = dataclasses.replace(opened.config.compress, method=Smoothquant())
    other = load_config(config, {"compress.rules": [{"weights": "int8"}]}).compress
    for settings in method, other:
        given = opened.config, opened.decoder, opened.shapes, settings
        *_, line = describe_layers(opened, settings, layout_of(*given))
        text, _, names = line.replace("\n ", "").partition(": ")
        what = "int4 in groups of 8 inputs"
        assert text == f"rounded once more, as the run learned {what}"
        assert names.count("blocks/") == 7


def test_the_plan_has_a_line_for_each_recipe(capsys):
    words = (f"--model={FOLDER / 'llama'}", "--device=H100")
    plan(typed("plan", "--compress", *words))
    lines = capsys.readouterr().out.splitlines()
    assert any("w4a16_gptq" in line for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"pattern": "("}, "[0].pattern='(' is not a regular expression"),
        ({"pattern": "nose"}, "[0].pattern='nose' matches no linear layer"),
        ({"group_size": 1}, "[0].group_size=1 lets no inputs share a scale"),
    ],
)
def test_the_plan_refuses_rules_that_compress_refuses(rule, expected):
    """Fails if a recipe is planned that `zjax compress` does not take."""
    start = settings_of_weights(str(FOLDER / "llama")) | WITHOUT_MOMENTS
    with pytest.raises(ConfigError) as error:
        report_recipes(load_config({}, start, {"compress.rules": [rule]}), "H100")
    assert f"compress.rules{expected}" in str(error.value)


def layout_of_family(family, **settings):
    opened = open_family(family, "nearest", **settings)
    given = opened.config, opened.decoder, opened.shapes
    return opened, layout_of(*given, opened.config.compress)


def test_a_token_reads_the_experts_that_it_chooses():
    """Fails if a mixture is timed as a dense model of all experts."""
    opened, layout = layout_of_family("mixtral", rules=[{"group_size": 4}])
    sizes = sizes_of(opened.config.model, layout)
    nbytes = {name: num_bytes(x) for name, x in layout.entries.items()}
    experts = sum(size for name, size in nbytes.items() if ".experts." in name)
    table = nbytes["model.embed_tokens.weight"]
    # Two of four experts.
    assert sizes.read == sum(nbytes.values()) - table - experts / 2


READ = "attention/query attention/key attention/value"


@pytest.mark.parametrize(
    ("family", "method", "names"),
    [
        (
            "olmo2",
            "awq",
            "attention/query attention/key attention/value mlp/gate mlp/up",
        ),
        ("mixtral", "awq", "mlp/experts/up"),
        ("mixtral", "smoothquant", "attention/out mlp/experts/up mlp/experts/down"),
    ],
)
def test_layers_without_factors_are_named(family, method, names):
    """Fails if a matrix is rounded to nearest although the method says otherwise."""
    opened = open_family(family, method)
    settings = opened.config.compress
    layout = layout_of(opened.config, opened.decoder, opened.shapes, settings)
    *_, line = describe_layers(opened, settings, layout)
    text, _, found = line.replace("\n ", "").partition(": ")
    assert text == f"without factors of {method}, rounded to nearest"
    assert {*found.split(", ")} == {f"blocks/{name}" for name in names.split()}


def test_a_tensor_of_several_layers_is_plain_if_a_rule_leaves_one():
    """Fails if a matrix that no rule rounds becomes codes."""
    pattern = "attention/(?!key)|mlp/(gate|up)"
    _, layout = layout_of_family("phi3", rules=[{"pattern": pattern, "group_size": 8}])
    ended = {name.split(".")[-2] for name in layout.entries if "_packed" in name}
    assert ended == {"o_proj", "gate_up_proj"}
    assert layout.coded == {"blocks/attention/out", "blocks/mlp/gate", "blocks/mlp/up"}
    shared = "blocks/attention/query", "blocks/attention/value"
    assert layout.uncoded == dict.fromkeys(shared, "layers share a tensor with others")
