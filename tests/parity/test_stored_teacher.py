"""A student learns from stored outcomes as from the teacher, which no run reads."""

import dataclasses
import pathlib
import pickle
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.parity.test_distillation import STUDENT, TEMPERATURE, WEIGHT, oracle
from tests.support import offload
from tests.support.refusals import config_error
from tests.weights.test_pruning import LARGE, save_run
from zjax.data import taught
from zjax.data.loader import make_loader
from zjax.data.source import open_rows
from zjax.errors import ConfigError, DataError
from zjax.ops import divergence as ops
from zjax.run import teach
from zjax.run.stored_teacher import StoredTeacher
from zjax.run.trainer import Trainer
from zjax.settings import distill as settings
from zjax.settings import schema

NUM_STEPS = 3
TAUGHT = 2
"""Steps of the stage."""
TOP_K, ALL = 4, 29
DIVERGENCES = (
    settings.ForwardKl(),
    settings.ReverseKl(),
    settings.JensenShannon(beta=0.3),
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run with large weights."""
    return save_run(LARGE, tmp_path_factory.mktemp("teacher"))[0]


@pytest.fixture(scope="module")
def stored(teacher, tmp_path_factory):
    """Directories of outcomes, by k."""
    folder = tmp_path_factory.mktemp("stored")
    paths = {k: str(folder / str(k)) for k in (TOP_K, ALL)}
    for k, path in paths.items():
        write(make_config(teacher), path, k)
    return paths


def make_config(path, **changes: Any):
    distill = schema.Distill(
        teacher=path, weight=WEIGHT, temperature=TEMPERATURE, fraction=TAUGHT / 3
    )
    config = offload.make_config(
        "device",
        0,
        model=STUDENT,
        distill=dataclasses.replace(distill, **changes.pop("distill", {})),
        evaluation=schema.Evaluation(num_batches=0),
        observe=schema.Observe(sinks=(), plot=False),
    )
    changes = {"num_steps": NUM_STEPS, "global_batch_size": 4} | changes
    return dataclasses.replace(config, **changes)


def write(config, path, k=TOP_K, **options):
    return teach.store_outcomes(config, path, k, devices=jax.devices()[:1], **options)


def train(config, steps=TAUGHT, num_devices=1):
    """Metrics of the first steps, and the run."""
    run = offload.start(config, devices=jax.devices()[:num_devices])
    state, found = run.state, []
    with make_loader(config, run.batch_placement, num_batches=steps) as loader:
        for batch in loader:
            state, metrics = run.step(state, batch)
            found.append({name: float(x) for name, x in metrics.items()})
    return found, run


@pytest.fixture(scope="module")
def of_few(stored):
    return train(make_config(stored[TOP_K]))[0]


def assert_same(found, expected):
    for mine, other in zip(found, expected, strict=True):
        for name in ("loss", "teacher_divergence"):
            np.testing.assert_allclose(mine[name], other[name], rtol=2e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda x: x.kind)
def test_divergences_of_outcomes_are_what_numpy_computes(divergence):
    """Fails if the rest is left out, or adds to other logits than its own."""
    beta = {"forward_kl": ops.FORWARD, "reverse_kl": ops.REVERSE}
    beta = beta.get(divergence.kind, 0.3)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 7)) * 2
    p = np.exp(rng.normal(size=(3, 7)) * 2)
    p /= p.sum(-1, keepdims=True)
    ids = np.argsort(-p)[:, :3]

    def merged(x):
        top = np.take_along_axis(x, ids, -1)
        return np.concatenate([top, 1 - top.sum(-1, keepdims=True)], -1)

    def value_at(logits):
        q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        if beta == ops.FORWARD:
            return np.sum(merged(p) * np.log(merged(p) / merged(q)), -1)
        return oracle(divergence, merged(p), merged(q))

    log_q = jax.nn.log_softmax(jnp.float32(logits))
    log_p = jnp.log(jnp.float32(merged(p)))
    values, slopes = ops.outcome_divergence(beta, log_p, log_q, jnp.asarray(ids))
    np.testing.assert_allclose(values, value_at(logits), rtol=1e-4)
    for token in range(7):
        step = 1e-5 * np.eye(7)[token]
        slope = (value_at(logits + step) - value_at(logits - step)) / 2e-5
        np.testing.assert_allclose(slopes[:, token], slope, rtol=1e-3, atol=1e-5)


def test_all_tokens_equal_the_teacher_in_memory(teacher, stored, of_few):
    """Fails if outcomes are of other rows, or a stored teacher is in memory."""
    expected, run = train(make_config(teacher))
    assert "hidden" in run.step.inputs.abstract(shapes(run)).batch["teacher"]
    found, run = train(make_config(stored[ALL]), NUM_STEPS)
    told = run.step.inputs.teacher
    assert isinstance(told, StoredTeacher) and not hasattr(told, "params")
    assert {*run.step.inputs.abstract(shapes(run)).batch["teacher"]} == {
        *("ids", "logprobs", "weight", "temperature")
    }
    assert_same(found[:TAUGHT], expected)
    assert "teacher_divergence" not in found[TAUGHT]
    # Outcomes that are added up differ less.
    few, all_tokens = (x[0]["teacher_divergence"] for x in (of_few, found))
    assert 0 < few < 0.99 * all_tokens


def shapes(run):
    tokens = jax.ShapeDtypeStruct((4, 8), np.int32)
    return {"tokens": tokens, "targets": tokens}


def test_split_vocabulary_and_microbatches_equal_one_device(stored, of_few):
    mesh, zero = schema.Mesh(tensor=2), schema.Zero(stage=3, min_shard_elements=8)
    settings = {"mesh": mesh, "zero": zero, "num_microbatches": 2}
    found, _ = train(make_config(stored[TOP_K], **settings), num_devices=4)
    assert_same(found, of_few)


def open_outcomes(config):
    given = config.data, config.model.vocab_size, config.distill.temperature
    settings, rows = taught.taught_settings(*given), open_rows(config, "train")
    return taught.open_outcomes(config.distill.teacher, settings, rows)


def read_all(config):
    """The rows of the stage, and their outcomes."""
    outcomes = open_outcomes(config)
    return outcomes.rows, outcomes.read(outcomes.rows)


def test_outcomes_are_the_likeliest_tokens_and_the_rest(stored):
    """Fails if tokens, their order or the last log-probability are others."""
    numbers, few = read_all(make_config(stored[TOP_K]))
    assert len(numbers) == 4 * TAUGHT
    _, everything = read_all(make_config(stored[ALL]))
    logprobs = everything[taught.LOGPROBS]
    assert (np.diff(logprobs[..., :-1]) <= 0).all() and (logprobs[..., -1] < -99).all()
    top = logprobs[..., :TOP_K]
    np.testing.assert_allclose(few[taught.LOGPROBS][..., :-1], top, atol=1e-6)
    rest = np.log(1 - np.exp(top.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(few[taught.LOGPROBS][..., -1], rest, atol=1e-4)
    np.testing.assert_array_equal(few[taught.IDS], everything[taught.IDS][..., :TOP_K])


def test_a_loader_goes_on_with_the_same_outcomes(stored):
    """Also in another process, which maps the files again."""
    config, place = make_config(stored[TOP_K]), make_sharding()
    with make_loader(config, place) as whole:
        batches = [next(whole) for _ in range(NUM_STEPS)]
    names = [taught.IDS in batch for batch in batches]
    assert names == [True, True, False]
    with make_loader(config, place) as parts:
        parts.set_state(whole.state() | {"step": 1})
        jax.tree.map(np.testing.assert_array_equal, next(parts), batches[1])
    with pytest.raises(DataError, match=r"distill.teacher='.*' was '.*' in the saved"):
        make_loader(make_config(stored[ALL]), place).set_state(whole.state())
    outcomes = open_outcomes(config)
    other = pickle.loads(pickle.dumps(outcomes))
    jax.tree.map(
        np.testing.assert_array_equal,
        other.read(outcomes.rows[3:1:-1]),
        {name: x[3:1:-1] for name, x in outcomes.read(outcomes.rows).items()},
    )


def make_sharding():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return lambda leaf: NamedSharding(mesh, P("data"))


def test_writing_goes_on_after_an_interruption(teacher, stored, tmp_path, monkeypatch):
    """Fails if half-written outcomes are read, or whole parts are computed again."""
    path, config = str(tmp_path / "parts"), make_config(teacher)
    monkeypatch.setattr(taught, "_PART_BYTES", 1)  # a batch
    compute = teach._Passes.outcomes
    firsts = []

    def stop(self, rows, numbers):
        firsts.append(numbers[0])
        if len(firsts) == 2:
            raise KeyboardInterrupt
        return compute(self, rows, numbers)

    monkeypatch.setattr(teach._Passes, "outcomes", stop)
    with pytest.raises(KeyboardInterrupt):
        write(config, path)
    pathlib.Path(path, "00001.outcomes").write_bytes(b"half")
    taken = make_config(path)
    with pytest.raises(DataError) as error:
        read_all(taken)
    assert str(error.value) == (
        f"distill.teacher='{path}' lacks 1 of 2 parts; run `zjax data teach` as "
        "before, which goes on"
    )
    lines = []
    write(config, path, report=lines.append)
    assert firsts[1] == firsts[2] != firsts[0] and len(firsts) == 3
    assert lines == ["1 of 2 parts are there already", "part 2 of 2: 4 rows"]
    _, found = read_all(taken)
    _, expected = read_all(make_config(stored[TOP_K]))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"model": {"vocab_size": 31}},
            "model.vocab_size=31 was 29 when distill.teacher={path!r} was written; "
            "restore it, or write it again by `zjax data teach`",
        ),
        (
            {"data": {"length": 16}},
            "data.length=16 was 8 when distill.teacher={path!r} was written; restore "
            "it, or write it again by `zjax data teach`",
        ),
        (
            {"distill": {"temperature": 1.0}},
            "distill.temperature=1.0 was 2.0 when distill.teacher={path!r} was "
            "written; restore it, or write it again by `zjax data teach`",
        ),
        (
            {"seed": 5},
            "data.digest='synthetic-5-0-29-8-0' was 'synthetic-0-0-29-8-0' when "
            "distill.teacher={path!r} was written; restore it, or write it again by "
            "`zjax data teach`",
        ),
        (
            {"global_batch_size": 8},
            "distill.teacher={path!r} lacks 8 of 16 rows that the stage draws; use "
            "the seed, global_batch_size and steps it was written with, or write it "
            "again by `zjax data teach`",
        ),
    ],
)
def test_other_rows_than_the_teacher_read_are_refused(change, text, stored):
    config = make_config(stored[TOP_K])
    for name, value in change.items():
        if isinstance(value, dict):
            value = dataclasses.replace(getattr(config, name), **value)
        config = dataclasses.replace(config, **{name: value})
    with pytest.raises(DataError) as error:
        make_loader(config, make_sharding())
    assert str(error.value) == text.format(path=stored[TOP_K])


BESIDE = "trains on other rows than a stored teacher has read; leave it out, or distil "
BESIDE += "from the run of the teacher"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"buckets": schema.Cut(shortest=4)}, f"buckets='cut' {BESIDE}"),
        (
            {"distill": {"hidden": settings.HiddenStates()}},
            "distill.hidden='hidden_states' compares layers, and distill.teacher "
            "stores the last outcomes alone; set distill.hidden to None, or give the "
            "run of the teacher",
        ),
        (
            {"distill": {"memory": "pinned_host"}},
            "distill.memory='pinned_host' has no effect on a stored teacher, which "
            "has no parameters; leave it out",
        ),
    ],
)
def test_settings_beside_stored_outcomes_are_refused(change, text, stored):
    with pytest.raises(ConfigError) as error:
        offload.start(make_config(stored[TOP_K], **change), devices=jax.devices()[:1])
    assert str(error.value) == text


def test_given_batches_have_no_outcomes(stored, tmp_path):
    path, config = stored[TOP_K], make_config(stored[TOP_K])
    with config_error(
        f"distill.teacher={path!r} is stored for rows of data, not for given batches; "
        "give the run of the teacher"
    ):
        devices = jax.devices()[:1]
        Trainer(config, batches=[offload.make_batch(0)], devices=devices)
    run = offload.start(config, devices=jax.devices()[:1])
    with pytest.raises(DataError) as error:
        run.step(run.state, offload.make_batch(0))
    assert str(error.value).splitlines()[0] == (
        "teacher/ids=None is missing, and distill.teacher is stored for rows of data; "
        "take batches of zjax.make_loader, which reads them"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("00000.outcomes", "/00000.outcomes' is damaged between bytes 0 and 1791; "),
        ("teacher.json", "' does not match the checksum of its teacher.json; "),
    ],
)
def test_damaged_outcomes_are_refused(name, text, stored, tmp_path):
    path = shutil.copytree(stored[TOP_K], tmp_path / "damaged")
    content = bytearray((path / name).read_bytes())
    content[200] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        read_all(make_config(str(path)))
    expected = f"distill.teacher='{path}{text}copy it again, or prepare it again"
    assert str(error.value) == expected


def test_outcomes_of_another_teacher_are_kept(teacher, stored):
    path = stored[TOP_K]
    with config_error(
        f"--output={path!r} holds outcomes of top_k=4, not of 5; name another "
        "directory, or remove this one"
    ):
        write(make_config(teacher), path, 5)
    with config_error("--top_k=30 is out of range for 29 tokens; use 1 to 29"):
        write(make_config(teacher), path, 30)
