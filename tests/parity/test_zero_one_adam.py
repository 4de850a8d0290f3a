"""0/1 Adam takes the steps of explicit workers, and sends what its schedule says."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from tests.reference.zero_one_adam import ZeroOneAdam, schedule
from tests.support import models, pipelines, rules, runs
from tests.support.crossing import SCALARS, crossing_bytes
from tests.support.first_state import placed
from tests.support.replicas import (
    HIDDEN,
    REPLICAS,
    WIDTH,
    assert_copies_are_equal,
    decayed_numbers,
    grads_of_workers,
    make_batch,
    make_model,
    note_programs,
)
from zjax.optim.build import make_optimizer
from zjax.optim.onebit import AdamSteps, make_adam_steps
from zjax.optim.zero_one_adam import zero_one_adam
from zjax.run.build import make_run
from zjax.schedule.exchange import LOCAL, MERGED, ONE_BIT, VARIANCE, make_exchanges
from zjax.schedule.learning_rate import make_schedule
from zjax.settings import schema

STEPS, KAPPA, FREEZE, SCALER, CLIPPER = 60, 4, 21, 8, 4
leaves = jax.tree.leaves
RATE, DECAY, CLIP = 1e-2, 0.1, 2.0


def settings(**changes):
    values = {
        "rule": "zero_one_adam",
        "peak_learning_rate": RATE,
        "schedule": "linear",
        "num_warmup_steps": 0,
        "freeze_step": FREEZE,
        "var_update_scaler": KAPPA,
        "local_step_scaler": SCALER,
        "local_step_clipper": CLIPPER,
        "clip_norm": CLIP,
        "weight_decay": DECAY,
    }
    return rules.optimizer(**values | changes)


def make_zero_one_run(model=None, num_devices=REPLICAS, mesh=None, stage=0, **changes):
    changes.setdefault("optimizer", settings())
    changes.setdefault("num_steps", STEPS)
    mesh = mesh or schema.Mesh(replica=REPLICAS)
    config = runs.make_config(stage, mesh=mesh, **changes)
    model = placed(model or models.make_mlp())
    tx = make_optimizer(config, model)
    return make_run(config, model, tx, devices=jax.devices()[:num_devices])


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0])


def emulator(state):
    params, unravel = ravel_pytree(jax.tree.map(np.asarray, state.master))
    decayed = decayed_numbers(state.master)
    bias, down, up = np.split(np.arange(params.size), [WIDTH, WIDTH + WIDTH * HIDDEN])
    workers = ZeroOneAdam(
        params,
        decayed,
        schedule(STEPS, KAPPA, FREEZE - 1, SCALER, CLIPPER),
        num_workers=REPLICAS,
        size=state.extra.errors[0].worker.shape[-1],
        arrays=[down, up, bias],
        decay=DECAY,
        clip=CLIP,
    )

    return workers, unravel


def test_every_phase_takes_the_steps_of_explicit_workers():
    """Fails for a lost error, update or sum of rates, or another schedule."""
    run = make_zero_one_run(make_model())
    rates, state = make_schedule(run.config), run.state
    workers, unravel = emulator(state)
    assert set(workers.kinds) == {"variance", "one_bit", "local", "merged"}
    for step in range(STEPS):
        grads = grads_of_workers(unravel, workers.params, make_batch(step))
        workers.step(grads, np.float32(rates(step)))
        state, _ = run.step(state, make_batch(step))
        replicas = state.extra.replicas
        for found, expected in (
            (state.master, workers.anchor),
            (replicas.master, workers.params),
            (replicas.opt_state.mu, workers.momentum),
        ):
            by_row = jax.vmap(lambda tree: ravel_pytree(tree)[0])
            rows = flat(found) if found is state.master else by_row(found)
            np.testing.assert_allclose(
                rows, expected, rtol=1e-5, atol=1e-5, err_msg=f"step {step + 1}"
            )


def test_with_an_update_of_moments_in_every_step_it_is_adam():
    """With the bias corrections of the warm-up of 1-bit Adam."""
    states = []
    for changes in ({"var_update_scaler": STEPS}, {"rule": "onebit_adam"}):
        run = make_zero_one_run(optimizer=settings(freeze_step=STEPS - 1, **changes))
        _, state = runs.train(run, 10)
        states.append(flat(state.master))
    np.testing.assert_allclose(*states, rtol=0, atol=1e-6)


def test_replicas_are_equal_but_between_exchanges():
    """Bit for bit; second moments always are."""
    run = make_zero_one_run(make_model())
    exchanges, state = make_exchanges(run.config), run.state
    for number in range(1, STEPS + 1):
        state, _ = run.step(state, make_batch(number))
        replicas = state.extra.replicas
        moments = replicas.opt_state
        for tree in (moments.nu, moments.steps, replicas.model_state):
            assert all((x == x[:1]).all() for x in map(np.asarray, leaves(tree)))
        apart = {
            bool((np.asarray(x) != np.asarray(shared)).any())
            for x, shared in zip(
                leaves(replicas.master), leaves(state.master), strict=True
            )
        }
        unlike = {bool((x != x[:1]).any()) for x in map(np.asarray, leaves(moments.mu))}
        assert apart == unlike == {exchanges.at(number).phase.name == "local"}, number
        assert_copies_are_equal(state.master)


def test_programs_follow_the_schedule_and_errors_start_again_once():
    """Fails if the meaning of errors changes and their values stay."""
    run = make_zero_one_run()
    calls, state, exchanges = note_programs(run), run.state, make_exchanges(run.config)
    for step in range(1, FREEZE + SCALER + 5):
        state, _ = run.step(state, models.make_batch(step))
        errors = [np.asarray(x) for x in leaves(state.extra.errors)]
        assert step == FREEZE or step < 5 or all(x.any() for x in errors)
        assert step != FREEZE or not any(x.any() for x in errors)
        phase = exchanges.at(step).phase.name
        merging = ["outer_gradients_0", "mean_0", "merge_0", "end_of_round"]
        expected = {"local": ["train"], "merged": ["train", *merging]}.get(phase)
        ending = ["without_errors"] if step == FREEZE else []
        assert calls == (expected or [phase]) + ending
        calls.clear()


def arguments_of(run, program):
    state = run.state
    replicas = state.extra.replicas
    grads = [replicas.master[name] for name in ("down", "up", "bias")]
    return {
        "outer_gradients_0": (state.master, replicas),
        "merge_0": (state.master, (), replicas, [g[0] for g in grads]),
    }[program]


def test_a_compressed_step_sends_two_bits_per_number():
    """Fails if gradients or moments cross replicas, too."""
    run = make_zero_one_run()
    count = run.state.extra.errors[0].worker.shape[-1]
    for program in ("one_bit", "mean_0"):
        sent = crossing_bytes(run, program)
        assert sent.pop("u8") == pytest.approx(count / 4, rel=0.01)
        assert set(sent) <= {SCALARS}
    full = 8 * sum(x.size for x in leaves(run.state.master))
    assert crossing_bytes(run, "variance")["u32"] == pytest.approx(full, rel=0.05)
    assert crossing_bytes(run, "merge_0", *arguments_of(run, "merge_0")) == {
        SCALARS: 16
    }


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        (schema.Mesh(replica=2), 3),
        (schema.Mesh(replica=4, tensor=2), 0),
    ],
)
def test_a_local_step_sends_nothing_to_other_replicas(mesh, stage):
    """Neither gradients nor losses, norms, or whether they are finite."""
    run = make_zero_one_run(mesh=mesh, stage=stage, num_devices=8)
    assert not crossing_bytes(run, "train")
    arguments = arguments_of(run, "outer_gradients_0")
    assert not crossing_bytes(run, "outer_gradients_0", *arguments)
    assert crossing_bytes(run, "one_bit")


def test_the_published_schedule_sends_less_than_onebit_adam():
    """1000/16/1000/16 in 20 000 steps: counted bytes, at least 1.5 times less."""
    published = settings(
        freeze_step=1001, var_update_scaler=16, local_step_scaler=1000,
        local_step_clipper=16,
    )  # fmt: skip
    run = make_zero_one_run(
        optimizer=published,
        num_steps=20_000,
        precision=schema.Precision(compute_dtype="bfloat16"),
    )
    full, one_bit, merged = (
        max(crossing_bytes(run, program).values())
        for program in ("variance", "one_bit", "mean_0")
    )
    sizes = {"variance": full, "one_bit": one_bit, "merged": merged, "local": 0}
    at = make_exchanges(run.config).at
    kinds = collections.Counter(at(step).phase.name for step in range(1, 20_001))
    expected = collections.Counter(schedule(20_000, 16, 1000, 1000, 16))
    assert kinds == expected
    sent = sum(sizes[kind] * number for kind, number in kinds.items())
    assert (1000 * full + 19_000 * one_bit) / sent > 3.5


@functools.cache
def losses_on_replicas_alone():
    """Losses of the first exchanges, and of the steps after them."""
    run = make_zero_one_run()
    losses, _ = runs.train(run, KAPPA + FREEZE + 14)
    return np.split(losses, [KAPPA])


@pytest.mark.parametrize(
    ("axes", "stage"), [({"tensor": 2}, 0), ({"data": 2}, 3)], ids=str
)
def test_axes_inside_a_replica_do_not_change_full_gradients(axes, stage):
    """Fails if a replica's own devices, or microbatches, count as replicas."""
    mesh, number = schema.Mesh(replica=REPLICAS, **axes), axes.get("data", 1)
    run = make_zero_one_run(
        num_devices=8, mesh=mesh, stage=stage, num_microbatches=number
    )
    losses, state = runs.train(run, KAPPA + FREEZE + 14)
    first, later = losses_on_replicas_alone()
    np.testing.assert_allclose(losses[:KAPPA], first, rtol=1e-5)
    np.testing.assert_allclose(losses[KAPPA:], later, rtol=5e-2)
    assert_copies_are_equal(state.master)


def float16_run(freeze_step):
    return make_zero_one_run(
        precision=schema.Precision(compute_dtype="float16"),
        optimizer=settings(freeze_step=freeze_step, var_update_scaler=1),
    )


def infinite_batch(rows=slice(0, 1)):
    batch = models.make_batch(9)
    batch["x"][rows] = 6e4
    return batch


def test_a_compressed_step_that_float16_skips_changes_no_error():
    """Fails if an overflow is fed back into all later steps."""
    run = float16_run(freeze_step=STEPS - 1)
    _, state = runs.train(run, 6)
    assert all(np.asarray(x).any() for x in leaves(state.extra.errors))

    def kept(state):
        replicas = state.extra.replicas
        arrays = state.master, state.extra.errors, replicas.opt_state, replicas.master
        return jax.tree.map(np.asarray, arrays)

    before, skipped = kept(state), int(state.num_skipped)
    state, metrics = run.step(state, infinite_batch())
    assert metrics["skipped_steps"] == skipped + 1 == int(state.num_skipped)
    jax.tree.map(np.testing.assert_array_equal, kept(state), before)
    assert (np.asarray(state.extra.replicas.scaler.last_overflow) == 6).all()


@pytest.mark.parametrize("rows", [slice(0, 1), slice(None)], ids=["one", "all"])
def test_local_steps_that_replicas_skip_leave_all_equal(rows):
    """Fails if a rate is counted whose step was not taken, or errors are infinite."""
    run = float16_run(freeze_step=2)
    _, state = runs.train(run, 6)
    start = jax.tree.map(np.asarray, state.extra.replicas.opt_state)
    before, bias = start.mu, np.asarray(state.master["bias"])
    skipped = np.asarray(state.extra.replicas.num_skipped)
    state, _ = run.step(state, infinite_batch(rows))
    replicas = state.extra.replicas
    found = np.asarray(replicas.num_skipped) - skipped
    assert found.tolist() == [1, 1, 1, 1]  # shared where replicas meet
    assert all(np.isfinite(x).all() for x in leaves((state.extra.errors, replicas)))
    for x, shared in zip(leaves(replicas.master), leaves(state.master), strict=True):
        assert (np.asarray(x) == np.asarray(shared)).all()
    after = jax.tree.map(np.asarray, replicas.opt_state.mu)
    for x, old in zip(leaves(after), leaves(before), strict=True):
        assert (x == x[:1]).all()
        assert (x == old).all() == (rows.stop is None)
    if rows.stop:
        # Of four replicas one took no step: the mean sum of rates is 3/4 of a rate.
        own = settings(freeze_step=2, var_update_scaler=1)
        moments = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x)[0]), replicas.opt_state
        )
        rate = 0.75 * float(make_schedule(run.config)(start.steps[0]))
        moved = (bias - np.asarray(state.master["bias"])) / rate
        expected = make_adam_steps(own.rule).momentum_of(
            moved, moments.nu["bias"], moments.steps, moments.variances
        )
        np.testing.assert_allclose(after["bias"][0], expected, rtol=1e-4, atol=1e-6)


def test_elements_without_second_moments_do_not_move():
    """One bit cannot say 0, and steps over a root of 0 would have no bound."""
    tx = zero_one_adam(lambda step: 0.5, AdamSteps(0.9, 0.95, 1e-8), lambda p: p * 0)
    params = jnp.zeros(2)
    _, state = tx.update(jnp.array([1.0, 0.0]), tx.init(params), params, phase=VARIANCE)
    for phase in (ONE_BIT, LOCAL, MERGED):
        updates, state = tx.update(jnp.ones(2), state, params, phase=phase)
        assert updates[0] < 0
        assert updates[1] == 0
    assert state.mu[1] == 0


def test_weights_decay_with_every_rate_and_the_momentum_does_not():
    """Fails if decay is lost in local steps, or comes back as momentum."""
    tx = zero_one_adam(
        lambda step: 0.5, AdamSteps(0.0, 0.0, 1e-8), lambda p: p * 0 + 0.1
    )
    anchor = jnp.array([2.0])
    _, state = tx.update(jnp.ones(1), tx.init(anchor), anchor, phase=VARIANCE)
    local = anchor
    for _ in range(3):
        updates, state = tx.update(jnp.ones(1), state, local, phase=LOCAL)
        local = local + updates
    updates, state = tx.update(anchor - local, state, anchor, phase=MERGED)
    np.testing.assert_allclose(updates, -1.5 - 1.5 * 0.1 * 2.0, rtol=1e-6)
    np.testing.assert_allclose(state.mu, 1.0, rtol=1e-6)
    assert state.rate_sum == 0


@pytest.mark.slow
def test_replicas_of_a_pipeline_learn_as_replicas_of_whole_models():
    """Fails if stages of one replica send to stages of another kind."""
    optimizer = settings(freeze_step=5, var_update_scaler=3, local_step_scaler=2)
    whole, staged = pipelines.losses_of_replicas(optimizer, 11)
    np.testing.assert_allclose(staged[:4], whole[:4], rtol=1e-5)
    np.testing.assert_allclose(staged, whole, rtol=2e-2)
