"""Runs that start from some layers and channels of a larger model."""

import dataclasses
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from tests.support import language
from tests.support.refusals import checkpoint_error, config_error
from tests.weights.test_growth import make_config, start_mixture
from zjax.checkpoint.contents import digest_start
from zjax.checkpoint.export import export_huggingface
from zjax.checkpoint.store import Store
from zjax.config.check import check_config
from zjax.config.load import load_config
from zjax.data.source import SyntheticRows
from zjax.models.build import make_model
from zjax.run import initialize, pruned_start
from zjax.run.saving import save
from zjax.run.trainer_settings import checked_settings
from zjax.run.without_effect import check_model_acts
from zjax.settings import schema
from zjax.settings.prune import Even, Influence, Listed, Prune
from zjax.weights import pruning
from zjax.weights.files import tensor_name
from zjax.weights.source import Entry, Source, name_leaves

LARGE = dataclasses.replace(language.LLAMA, num_layers=4)
"""16 channels, 24 hidden, 4 heads of 4 in 2 groups, 29 tokens."""
MOE = schema.TokenChoice(num_experts=4, top_k=2, expert_size=8)
DEAD_LAYER, DEAD_CHANNELS, DEAD_HIDDEN = 2, (3, 7, 8, 15), range(5, 13)
DEAD_GROUPS = (0, 1, 0, 1)
"""Group of heads without outputs, by layer."""


def draw(shape):
    """Random weights by name; some layers, groups and channels do nothing."""
    decoder = language.make_language_model(shape)
    weights = {
        n: np.array(x) for n, x in name_leaves(language.params_of(decoder)).items()
    }
    for layer, group in enumerate(DEAD_GROUPS[: shape.num_layers]):
        weights["blocks/attention/value/kernel"][layer, :, group] = 0
    if not shape.moe:
        weights["blocks/mlp/up/kernel"][:, :, [*DEAD_HIDDEN]] = 0
        weights["blocks/mlp/down/kernel"][DEAD_LAYER] = 0
        weights["blocks/attention/out/kernel"][DEAD_LAYER] = 0
    for name in ("attention_norm", "mlp_norm"):
        weights[f"blocks/{name}/scale"][:, [*DEAD_CHANNELS]] = 0
    return weights


def save_run(shape, folder):
    weights = draw(shape)
    file = folder / "w.safetensors"
    tensors = {n.replace("/", "."): x for n, x in weights.items()}
    safetensors.numpy.save_file(tensors, file)
    run = start_mixture(_config(shape, file))
    save(folder / "checkpoints", run.state, run)
    return str(folder), weights


def _config(shape, path, *overrides, **sections):
    base = make_config(dataclasses.replace(shape, moe=None), path, None, **sections)
    return load_config(dataclasses.replace(base, model=shape), *overrides)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return save_run(LARGE, tmp_path_factory.mktemp("large"))


def start(small, path, directory, **settings):
    config = _config(small, path, prune=Prune(**settings), directory=str(directory))
    data = dataclasses.replace(config.data, length=8)
    return start_mixture(dataclasses.replace(config, data=data))


def weights_of(run):
    return {n: np.asarray(x) for n, x in name_leaves(run.state.master).items()}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"layers": Even()}, (0, 3)),
        ({"layers": Listed(numbers=(1, 2))}, (1, 2)),
    ],
)
def test_fewer_layers_are_layers_of_the_larger_model(settings, kept, large, tmp_path):
    """Bit for bit; fails if the run begins with random or with other layers."""
    path, weights = large
    run = start(dataclasses.replace(LARGE, num_layers=2), path, tmp_path, **settings)
    found = weights_of(run)
    assert found.keys() == weights.keys()
    for name, x in found.items():
        is_layer = name.startswith("blocks/")
        expected = weights[name][list(kept)] if is_layer else weights[name]
        np.testing.assert_array_equal(x, expected, err_msg=name)


NARROW = dataclasses.replace(
    LARGE,
    num_layers=3,
    embed_size=12,
    mlp_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_size=4,
)


@pytest.fixture(scope="module")
def narrow(large, tmp_path_factory):
    """Weights that start from parts of the larger run."""
    return weights_of(start(NARROW, large[0], tmp_path_factory.mktemp("narrow")))


def test_what_does_nothing_is_taken_away(large, narrow):
    """Fails if importance ranks layers, channels or heads of zeros above others."""
    weights, found = large[1], narrow
    layers = [x for x in range(4) if x != DEAD_LAYER]
    channels = [x for x in range(16) if x not in DEAD_CHANNELS]
    hidden = [x for x in range(24) if x not in DEAD_HIDDEN]
    groups = [1 - DEAD_GROUPS[x] for x in layers]
    up = weights["blocks/mlp/up/kernel"][np.ix_(layers, channels, hidden)]
    np.testing.assert_array_equal(found["blocks/mlp/up/kernel"], up)
    down = weights["blocks/mlp/down/kernel"][np.ix_(layers, hidden, channels)]
    np.testing.assert_array_equal(found["blocks/mlp/down/kernel"], down)
    for place, (layer, group) in enumerate(zip(layers, groups, strict=True)):
        query = weights["blocks/attention/query/kernel"][layer][channels]
        both = query[:, [2 * group, 2 * group + 1]]
        np.testing.assert_array_equal(
            found["blocks/attention/query/kernel"][place], both
        )
        key = weights["blocks/attention/key/kernel"][layer][channels][:, [group]]
        np.testing.assert_array_equal(found["blocks/attention/key/kernel"][place], key)
    table = weights["embedding/tokens"][:, channels]
    np.testing.assert_array_equal(found["embedding/tokens"], table)
    number = 2 * 29 * 12 + 12 + 3 * (2 * 12 + 12 * 4 * (2 + 1 + 1 + 2) + 3 * 12 * 16)
    assert sum(x.size for x in found.values()) == number


def test_a_hugging_face_directory_starts_what_the_run_starts(large, narrow, tmp_path):
    """Fails if another layout is measured, or other parts are read."""
    folder = tmp_path / "hf"
    export_huggingface(Store(f"{large[0]}/checkpoints"), str(folder))
    before = digest_start(str(folder))
    found = weights_of(start(NARROW, str(folder), tmp_path / "run"))
    jax.tree.map(np.testing.assert_array_equal, found, narrow)
    assert digest_start(str(folder)) == before
    (file,) = folder.glob("*.safetensors")
    os.utime(file, ns=(0, 0))
    assert digest_start(str(folder)) != before


def test_the_choice_is_made_once(large, tmp_path, monkeypatch, caplog):
    """Fails if a second start measures again, or reads a damaged record."""
    path, _ = large
    run = start(NARROW, path, tmp_path)
    first = weights_of(run)
    assert caplog.messages[-1] == (
        f"checkpoint.init_from='{path}' is pruned: layers 0, 1, 3 of 4; 12 of 16 "
        "channels; 2 of 4 heads; 16 of 24 hidden channels stay"
    )
    monkeypatch.setattr(pruned_start, "measure", None)
    again = weights_of(start(NARROW, path, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, again, first)
    config = _config(NARROW, path, prune=Prune(), directory=str(tmp_path))
    recorded = pruned_start.recorded(config)
    assert recorded is not None and recorded.kept.layers == (0, 1, 3)
    forgetful = dataclasses.replace(config, prune=None)
    with checkpoint_error(
        f"prune=None forgets that the run began with parts that {tmp_path}/pruned.json "
        "names; set prune as before; remove the file if no run began from it"
    ):
        pruned_start.recorded(forgetful)
    save(tmp_path / "checkpoints", run.state, run)
    # Step 0 of a run is made again whatever data is there by now.
    again = pruned_start.decide(dataclasses.replace(config, seed=5))
    assert again is not None and again.kept == recorded.kept
    shallower = dataclasses.replace(NARROW, num_layers=2)
    with checkpoint_error(
        f"directory={str(tmp_path)!r} holds a run that began from other parts: sizes "
        "of model differ; use the settings of the run, or another directory"
    ):
        pruned_start.decide(dataclasses.replace(config, model=shallower))
    shutil.rmtree(tmp_path / "checkpoints")
    file = pathlib.Path(tmp_path, "pruned.json")
    record = json.loads(file.read_text())
    record["kept"]["layers"] = [1, 2, 3]
    file.write_text(json.dumps(record))
    with checkpoint_error(
        f"directory={str(file)!r} cannot read which parts of a larger model began the "
        "run: its checksum differs; restore the file, or begin a run in another "
        "directory"
    ):
        start(NARROW, path, tmp_path)


def test_a_choice_of_other_inputs_is_made_anew(large, tmp_path, monkeypatch, caplog):
    """Fails if a start takes what other rows, weights or settings have measured."""
    path, record = large[0], tmp_path / "pruned.json"
    sizes = (4,), (16,), (4, 2), (4, 24), (4, 0)
    scores = pruning.Importance(*(np.ones(x, np.float32) for x in sizes))
    calls = []
    monkeypatch.setattr(
        pruned_start, "measure", lambda *given: calls.append(given) or scores
    )
    config = _config(NARROW, path, prune=Prune(), directory=str(tmp_path))

    def decided(config):
        caplog.clear()
        pruned_start.decide(config)
        return len(calls), caplog.messages[0]

    def anew(names):
        before = f"{record} is of an earlier start"
        return f"{before}, and {names} differ: parts are chosen anew"

    assert decided(config)[0] == 1
    number, text = decided(dataclasses.replace(config, num_steps=7))
    assert number == 1 and text.startswith("checkpoint.init_from=")
    seeded = dataclasses.replace(config, seed=1)
    assert decided(seeded) == (2, anew("rows (data or seed)"))
    monkeypatch.setattr(pruned_start, "digest_start", lambda path: "of others")
    assert decided(seeded) == (3, anew("the weights of checkpoint.init_from"))
    half = load_config(seeded, "precision.compute_dtype=bfloat16")
    assert decided(half) == (4, anew("precision.compute_dtype"))
    shallower = dataclasses.replace(NARROW, num_layers=2)
    even = dataclasses.replace(half, model=shallower, prune=Prune(layers=Even()))
    assert decided(even) == (5, anew("sizes of model and prune"))


class FewRows(SyntheticRows):
    def __len__(self):
        return 5


def test_more_rows_than_the_data_has_are_refused(large, tmp_path, monkeypatch):
    rows = FewRows(0, "train", 29, 8, 0)
    monkeypatch.setattr(pruned_start, "open_rows", lambda config, split: rows)
    with config_error(
        "prune.num_rows=6 is more than the 5 rows of the train data; use 5 or fewer"
    ):
        start(NARROW, large[0], tmp_path, num_rows=6)


def test_given_batches_measure_nothing_and_that_is_told(large, tmp_path, caplog):
    """Fails if the rows of the settings are measured without a word."""
    config = _config(NARROW, large[0], prune=Prune(), directory=str(tmp_path))
    batch = {"tokens": np.zeros((8, 16), np.int32), "targets": np.ones((8, 16), int)}
    devices = jax.devices()[:1]
    given = make_model(config), None, None, batch, config
    initialize.prepare(*given, replicated=(), cast=None, devices=devices)
    checked_settings(config, None, None, [batch], None, devices)
    expected = (
        "prune: importance is measured on rows of data.source='synthetic', not on the "
        "batches that are given; set data to rows like these, or keep layers by "
        "prune.layers='even' or 'listed'"
    )
    assert caplog.messages.count(expected) == 2
    checked_settings(config, None, None, None, None, devices)
    even = dataclasses.replace(LARGE, num_layers=2)
    config = dataclasses.replace(config, model=even, prune=Prune(layers=Even()))
    checked_settings(config, None, None, [batch], None, devices)
    assert caplog.messages.count(expected) == 2


def test_a_model_of_the_user_has_no_parts_to_take(large):
    config = _config(NARROW, large[0], prune=Prune())
    model = dataclasses.replace(make_model(config), stack=None)
    with config_error(
        "prune='prune' takes parts of the built-in decoder, not of the model that was "
        "given; leave it out, or give zjax.make_model(config)"
    ):
        check_model_acts(config, model)


PLACES = {
    "tokens": ".c",
    "positions": ".c",
    "scale": "c",
    "bias": "c",
    "query/kernel": "cq.",
    "query/bias": "q.",
    "key/kernel": "ck.",
    "key/bias": "k.",
    "value/kernel": "ck.",
    "value/bias": "k.",
    "out/kernel": "q.c",
    "up/kernel": "cf",
    "up/bias": "f",
    "down/kernel": "fc",
    "router/kernel": "ce",
    "experts/gate/kernel": "ec.",
    "experts/up/kernel": "ec.",
    "experts/down/kernel": "e.c",
    "shared/gate/kernel": "c.",
    "shared/up/kernel": "c.",
    "shared/down/kernel": ".c",
}
"""What the dims of arrays are, by the longest end of the name that is here: channels,
query heads, heads of keys, hidden channels of a feed-forward, experts."""
TIED = dataclasses.replace(language.GPT, num_layers=3)
SHARED = dataclasses.replace(
    LARGE, num_layers=3, tied_head=True, moe=dataclasses.replace(MOE, num_shared=1)
)


@pytest.mark.parametrize("shape", [TIED, SHARED], ids=["tied", "experts"])
def test_parts_are_slices_of_every_array(shape):
    """Fails if a bias, a shared expert or a tied table keeps other parts."""
    kept = pruning.Kept(
        layers=(0, 2),
        channels=(1, 4, 5, 15),
        groups=((1,), (0,)),
        hidden=None if shape.moe else ((2, 3), (7, 23)),
        experts=((0, 2, 3), (1, 2, 3)) if shape.moe else None,
        heads_per_group=int(shape.num_heads // shape.num_kv_heads),
    )
    arrays = {tensor_name(name): x for name, x in draw(shape).items()}
    entries = {name: Entry(x.shape, str(x.dtype)) for name, x in arrays.items()}
    source = Source(entries, lambda name, index: arrays[name][index])
    dims = pruning.named_dims(make_model(_config(shape, "runs/large")))
    found = pruning.pruned(source, kept, dims)
    assert found.entries.keys() == arrays.keys()
    each = kept.heads_per_group
    for name, x in arrays.items():
        path = name.replace(".", "/")
        ends = [end for end in PLACES if path.endswith(end)]
        places = PLACES[max(ends, key=len)]
        layers = enumerate(kept.layers) if name.startswith("blocks") else [(0, None)]
        expected = []
        for i, layer in layers:
            (group,) = kept.groups[i]
            parts = {
                "c": kept.channels,
                "q": [each * group + head for head in range(each)],
                "k": [group],
                "f": kept.hidden and kept.hidden[i],
                "e": kept.experts and kept.experts[i],
            }
            one = x if layer is None else x[layer]
            for axis, place in enumerate(places):
                one = one if place == "." else np.take(one, parts[place], axis)
            expected.append(one)
        expected = np.stack(expected) if name.startswith("blocks") else expected[0]
        np.testing.assert_array_equal(found.read_all(name), expected, err_msg=name)


def test_experts_that_few_tokens_choose_are_taken_away(tmp_path):
    """Fails if router and experts keep different experts."""
    large = dataclasses.replace(LARGE, num_layers=2, moe=MOE)
    path, weights = save_run(large, tmp_path)
    moe = dataclasses.replace(MOE, num_experts=3)
    small = dataclasses.replace(large, moe=moe)
    run = start(small, path, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "pruned.json").read_text())
    found = weights_of(run)
    for layer, kept in enumerate(record["kept"]["experts"]):
        for name in ("mlp/router/kernel", "mlp/experts/up/kernel"):
            expected = weights[f"blocks/{name}"][layer]
            is_router = "router" in name
            expected = expected[:, kept] if is_router else expected[kept]
            np.testing.assert_array_equal(found[f"blocks/{name}"][layer], expected)


@pytest.mark.parametrize(
    ("small", "settings", "text"),
    [
        (
            {},
            {},
            "prune='prune' takes nothing away: model is as large as "
            "checkpoint.init_from={path!r}; set it to None, or use fewer or narrower "
            "layers",
        ),
        (
            {"num_layers": 5},
            {},
            "model.num_layers=5 is more than the 4 of checkpoint.init_from={path!r}; "
            "use at most 4",
        ),
        (
            {"embed_size": 12, "head_size": 3},
            {},
            "model.head_size=3 is 4 in checkpoint.init_from={path!r}; use 4",
        ),
        (
            {"num_heads": 3, "num_kv_heads": 1, "head_size": 4},
            {},
            "model.num_heads=3 leaves no whole groups: 2 heads share keys and values "
            "in checkpoint.init_from={path!r}; use 2 times model.num_kv_heads=1",
        ),
        (
            {"num_layers": 2, "norm_eps": 0.01},
            {},
            "model.norm_eps=0.01 is 1e-05 in checkpoint.init_from={path!r}; use 1e-05",
        ),
        (
            {"num_layers": 2, "vocab_size": 32},
            {},
            "model.vocab_size=32 is 29 in checkpoint.init_from={path!r}; use 29",
        ),
        (
            {"num_layers": 2},
            {"layers": Listed(numbers=(1,))},
            "prune.layers.numbers=(1,) lists 1 layers, and model.num_layers=2; list 2",
        ),
        (
            {"num_layers": 2},
            {"layers": Listed(numbers=(1, 4))},
            "prune.layers.numbers=(1, 4) names a layer that "
            "checkpoint.init_from={path!r} does not have; use 0 to 3",
        ),
        (
            {"num_layers": 2},
            {"layers": Listed(numbers=(2, 1))},
            "prune.layers.numbers=(2, 1) are not ascending from 0; sort them",
        ),
        (
            {"mlp_size": 16},
            {"layers": Even()},
            "prune.layers='even' chooses no layers: model.num_layers is that of "
            "checkpoint.init_from={path!r}; leave it out",
        ),
        (
            {"num_layers": 2},
            {"layers": Even(), "num_rows": 4},
            "prune.num_rows=4 is read by no measurement; leave it at 32, or set "
            "prune.layers='influence'",
        ),
    ],
)
def test_what_cannot_be_pruned_is_refused(small, settings, text):
    model, path = dataclasses.replace(LARGE, **small), "runs/large"
    found = pruning.misfits(LARGE, model, Prune(**settings), path)
    assert [str(x) for x in found] == [text.format(path=path)]


def test_shorter_texts_need_a_shorter_table_alone():
    """Fails if rotations forbid shorter texts, or a table of others is measured."""
    pruned = Prune(layers=Influence())

    def found(large):
        changed = {"num_layers": 2, "max_length": 8}
        if isinstance(large.positions, schema.Rotary):
            rotary = dataclasses.replace(large.positions, max_positions=8)
            changed["positions"] = rotary
        small = dataclasses.replace(large, **changed)
        return [*map(str, pruning.misfits(large, small, pruned, "runs/large"))]

    assert not found(LARGE)
    learned = dataclasses.replace(LARGE, positions=schema.Learned(), max_length=16)
    text = "model.max_length=8 is 16 in checkpoint.init_from='runs/large'; use 16"
    assert found(learned) == [text]


@pytest.mark.parametrize(
    ("large", "text"),
    [
        (
            dataclasses.replace(language.LATENT, num_layers=4),
            "has model.latent, whose shared keys have no heads to take; use a model "
            "without latent attention",
        ),
        (
            dataclasses.replace(language.BERT, num_layers=4),
            "is an encoder, which prune does not take; use a decoder",
        ),
        (
            dataclasses.replace(LARGE, moe=dataclasses.replace(MOE, every=2)),
            "has layers of several kinds, and prune takes layers of one kind; use a "
            "model whose layers are alike",
        ),
    ],
)
def test_models_without_parts_to_take_are_refused(large, text):
    small = dataclasses.replace(large, num_layers=2)
    found = pruning.misfits(large, small, Prune(layers=Influence()), "runs/large")
    assert [str(x) for x in found] == [f"checkpoint.init_from='runs/large' {text}"]


def test_a_pruned_start_needs_a_model(tmp_path):
    with config_error(
        "checkpoint.init_from='' names no larger model to start from; give the "
        "directory of a run or of a Hugging Face checkpoint"
    ):
        check_config(load_config({"prune": "prune"}), 1)
    file = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(1, np.float32)}, file)
    with checkpoint_error(
        f"checkpoint.init_from={str(file)!r} says of no model how large it is, which "
        "prune compares; give the directory of a run, or of a Hugging Face checkpoint"
    ):
        start(NARROW, str(file), tmp_path)
