"""A run of `zjax.initialize` is saved and goes on, with public names alone."""

import fcntl
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.support.refusals import checkpoint_error

BATCH = {
    "x": np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32),
    "y": np.ones((8, 16), np.float32),
}


def make_run(num_devices=8, *, width=8192, **zero):
    def init(key):
        w = jax.random.normal(key, (16, width)) / 4
        return {"w": w, "v": {"b": jnp.zeros(width)}}

    def apply(params, x):
        return x @ params["w"] + params["v"]["b"][None]

    def loss_fn(model, batch, key):
        return jnp.mean((model(batch["x"])[:, :1] - batch["y"]) ** 2)

    return zjax.initialize(
        (init, apply),
        optax.adam(0.01),
        loss_fn,
        BATCH,
        {"zero": {"min_shard_elements": 1} | zero},
        devices=jax.devices()[:num_devices],
    )


def losses(run, state, steps):
    found = []
    for _ in range(steps):
        state, metrics = run.step(state, BATCH)
        found.append(float(metrics["loss"]))
    return found, state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Step 2 of four under ZeRO-3, and the losses of all."""
    directory = str(tmp_path_factory.mktemp("saved"))
    run = make_run(stage=3)
    first, state = losses(run, run.state, 2)
    zjax.save(directory, state, run, extra={"epoch": 7})
    last, _ = losses(run, state, 2)  # saving has not consumed it
    assert last[1] < last[0] < first[0]
    return directory, last


@pytest.mark.parametrize(
    ("num_devices", "zero"),
    [(8, {"stage": 3}), (2, {"stage": 1}), (1, {"offload": "pinned_host"})],
    ids=["as-saved", "others", "offloaded"],
)
def test_a_run_goes_on_from_what_was_saved(saved, num_devices, zero):
    directory, expected = saved
    run = make_run(num_devices, **zero)
    state, extra = zjax.restore(directory, run)
    assert (int(state.step), extra) == (2, {"epoch": 7})
    exact = num_devices == 8
    found, _ = losses(run, state, 2)
    np.testing.assert_allclose(found, expected, rtol=0 if exact else 1e-5)


def test_the_first_state_makes_room_once_the_other_is_found_right(saved):
    """Fails if two states are held, or none is left after an error."""
    directory, _ = saved
    run = make_run(width=8)
    with pytest.raises(zjax.CheckpointError, match=r"is float32\[16,8192\] in"):
        zjax.restore(directory, run)
    losses(run, run.state, 1)
    run = make_run()
    zjax.restore(directory, run, step=2)
    assert all(x.is_deleted() for x in jax.tree.leaves(run.state.master))


def test_another_setting_optimizer_or_loss_is_told(tmp_path, caplog):
    """Fails if a run goes on otherwise than it was saved, in silence."""

    def make(rate, penalty=0.0, **precision):
        model = lambda key: {"w": jnp.ones((16, 1))}, lambda params, x: x @ params["w"]

        def loss_fn(model, batch, key):
            return jnp.mean(model(batch["x"]) ** 2) + penalty

        tx = optax.adam(rate)
        return zjax.initialize(model, tx, loss_fn, BATCH, {"precision": precision})

    def told(*args, **settings):
        caplog.clear()
        zjax.restore(tmp_path, make(*args, **settings))
        return caplog.messages

    run = make(0.1)
    zjax.save(tmp_path, run.state, run)
    end = "the computation differs from the saved run"
    assert told(0.1) == []
    assert told(0.2) == [f"tx: {end}"]
    assert told(0.1, 1.0) == [f"model: {end}"]
    assert told(0.1, on_nonfinite="update") == [
        "settings that differ from step 0:\n"
        "  precision.on_nonfinite: 'skip' -> 'update'"
    ]


def test_old_steps_stay_unless_asked(tmp_path):
    run = make_run()
    state = run.state
    for keep_last, kept in ((None, 1), (None, 2), (None, 3), (1, 1)):
        state, _ = run.step(state, BATCH)
        zjax.save(str(tmp_path), state, run, keep_last=keep_last)
        assert len(list(tmp_path.glob("[0-9]*"))) == kept
    with pytest.raises(zjax.CheckpointError, match="step=4 is not after step 4"):
        zjax.save(str(tmp_path), state, run)


def test_a_directory_that_a_run_writes_into_is_refused(tmp_path):
    run = make_run(1, width=8)
    with open(tmp_path / "lock.json", "w") as file:
        file.write('{"host": "there", "pid": 7, "since": "noon"}')
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(zjax.ProcessError) as error:
            zjax.save(tmp_path, run.state, run)
    assert str(error.value) == (
        f"directory={str(tmp_path)!r} is in use by another run (host there, pid 7, "
        "since noon); wait until it ends, or use another directory"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]


def test_arguments_that_cannot_be_used(tmp_path):
    """Fails if checkpoints go where the program was started."""
    run = make_run()
    for use in (lambda: zjax.save("", run.state, run), lambda: zjax.restore("", run)):
        with checkpoint_error(
            "directory='' is empty; give a path; . is this directory"
        ):
            use()
    with checkpoint_error(
        "keep_last=0 keeps no checkpoint; use 1 or more, or None to keep all\n"
        "extra='dict' cannot be written as JSON (Object of type module is not JSON "
        "serializable); give a dict of numbers, texts, lists and dicts"
    ):
        zjax.save(str(tmp_path), run.state, run, extra={"x": jnp}, keep_last=0)
    assert list(tmp_path.iterdir()) == []


DEEP = functools.reduce(lambda x, _: [x], range(600), 0)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        pytest.param({"a": {1: 2}}, "the key 1 is not a text", id="number-as-key"),
        pytest.param({"a": [{"1": 2, 1: 3}]}, "the key 1 is not a text", id="two-ones"),
        pytest.param({"a": DEEP}, "it is nested deeper than 500 levels", id="deep"),
        pytest.param({"a": "x" * 50}, "it has more than 50 bytes", id="large"),
    ],
)
def test_values_that_could_not_be_read_again_are_not_saved(
    tmp_path, extra, problem, monkeypatch
):
    """Fails if `zjax.restore` refuses, or changes, what `zjax.save` took."""
    monkeypatch.setattr("zjax.checkpoint.steps.MAX_INDEX_BYTES", 50)
    run = make_run()
    with checkpoint_error(
        f"extra='dict' cannot be written as JSON ({problem}); give a dict of numbers, "
        "texts, lists and dicts"
    ):
        zjax.save(tmp_path, run.state, run, extra=extra)
    with pytest.raises(zjax.CheckpointError, match="it has more than 50 bytes"):
        zjax.save(tmp_path, run.state, run)  # with all that a checkpoint describes
    assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]


def make_named(*names):
    def init(key):
        params = {}
        for name in names:
            part = params
            for key in name[:-1]:
                part = part.setdefault(key, {})
            part[name[-1]] = jnp.ones((16, 1))
        return params

    def apply(params, x):
        return sum(x @ w for w in jax.tree.leaves(params))

    def loss_fn(model, batch, key):
        return jnp.mean((model(batch["x"]) - 1) ** 2)

    return zjax.initialize((init, apply), optax.sgd(0.1), loss_fn, BATCH)


def test_names_with_slashes_and_dots(tmp_path):
    run = make_named(("a/b",), ("..",), ("/c", "d.e"), ("f[0]",), ("g\nh",))
    state, _ = run.step(run.state, BATCH)
    before = jax.tree.map(np.asarray, state.master)
    zjax.save(str(tmp_path), state, run)
    state, _ = zjax.restore(str(tmp_path), run)
    jax.tree.map(np.testing.assert_array_equal, state.master, before)


def test_two_arrays_of_one_name_are_refused_before_training():
    with pytest.raises(zjax.CheckpointError) as error:
        make_named(("a/b",), ("a", "b"))
    assert str(error.value).splitlines()[0] == (
        "checkpoint='master/a/b' names two arrays, .master['a']['b'] and "
        ".master['a/b']; rename one of them, without a slash"
    )
