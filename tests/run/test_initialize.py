"""A run from a model, an optimizer and a loss; and what cannot become one."""

import dataclasses

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zjax
from tests.support import models, runs
from tests.support.refusals import config_error, data_error, model_error, plan_error
from zjax.errors import ConfigError
from zjax.run import fit
from zjax.settings import schema
from zjax.sharding import mesh as meshes

CONFIG = {
    "precision": {"compute_dtype": "float32"},
    "zero": {"stage": 3, "min_shard_elements": 32},
}


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x, train=False):
        x = flax.linen.Dense(32)(x)
        x = flax.linen.BatchNorm(use_running_average=not train)(x)
        return flax.linen.Dense(models.WIDTH)(flax.linen.gelu(x))


class Tied(nnx.Module):
    """One matrix used on the way in and on the way out."""

    def __init__(self, rngs):
        self.up = nnx.Linear(models.WIDTH, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)

    def __call__(self, x):
        return nnx.gelu(self.norm(self.up(x))) @ self.up.kernel.T


def squared_error(model, batch, key):
    args = {"train": key is not None} if isinstance_linen(model) else {}
    return jnp.mean((model(batch["x"], **args) - batch["y"]) ** 2)


def isinstance_linen(view):
    return hasattr(view, "train") and not isinstance(view, nnx.Module)


FLAX_MODELS = {
    "linen-module": Linen,
    "nnx-factory": lambda: Tied,
    "nnx-module": lambda: Tied(nnx.Rngs(0)),
}


@pytest.mark.parametrize("kind", FLAX_MODELS)
def test_flax_models_train_split_and_evaluate(kind):
    """Fails if parameters are not split, statistics do not move, or training stalls."""
    model = FLAX_MODELS[kind]()
    batch = models.make_batch()
    run = zjax.initialize(model, optax.adam(1e-2), squared_error, batch, CONFIG)
    rows = jax.tree.leaves(run.plan.compute)
    assert any(row.device_bytes * 8 == 4 * np.prod(row.shape) for row in rows)
    before = jax.tree.map(np.asarray, run.state.model_state)
    state, first = run.step(run.state, batch)
    moved = jax.tree.map(
        lambda a, b: not np.array_equal(a, b), before, state.model_state
    )
    assert any(jax.tree.leaves(moved))
    statistics = jax.tree.map(np.asarray, state.model_state)
    for _ in range(20):
        state, metrics = run.step(state, batch)
    assert metrics["loss"] < first["loss"]
    kept = jax.tree.map(np.asarray, state.model_state)
    run.evaluate(state, batch)
    jax.tree.map(np.testing.assert_array_equal, kept, state.model_state)
    assert not np.array_equal(*map(jax.tree.leaves, (statistics, kept)))
    assert run.bind(state)(batch["x"]).shape == batch["y"].shape


def test_two_models_play_against_each_other_in_one_loss():
    """A GAN: each network follows its own loss alone, in one step."""

    def init(key):
        return {"w": 0.1 * jax.random.normal(key, (models.WIDTH, models.WIDTH))}

    def apply(params, x):
        return x @ params["w"]

    def loss_fn(model, batch, key):
        fake = model.generator(batch["x"])
        stop = jax.lax.stop_gradient
        judge = model.discriminator
        critic = jnp.mean(judge(stop(fake))) - jnp.mean(judge(batch["y"]))
        frozen = stop(judge(jnp.eye(models.WIDTH)))
        generator = -jnp.mean(fake @ frozen)
        return critic + generator, 1.0, {"critic": critic, "generator": generator}

    networks = {"generator": (init, apply), "discriminator": (init, apply)}
    tx = optax.multi_transform(
        {"generator": optax.sgd(0.1), "discriminator": optax.sgd(0.3)},
        {"generator": "generator", "discriminator": "discriminator"},
    )
    batch = models.make_batch()
    run = zjax.initialize(
        networks, tx, loss_fn, batch, CONFIG | {"num_microbatches": 2}
    )
    before = jax.tree.map(np.asarray, run.state.master)
    state, metrics = run.step(run.state, batch)
    assert {"critic", "generator"} <= metrics.keys()
    steps = jax.tree.map(
        lambda a, b: np.abs(a - np.asarray(b)).max(), state.master, before
    )
    assert all(step > 0 for step in jax.tree.leaves(steps))


def test_given_weights_are_those_that_train():
    module = Tied(nnx.Rngs(3))
    kernel = np.asarray(module.up.kernel[...])
    run = zjax.initialize(
        module, optax.sgd(0.1), squared_error, models.make_batch(), CONFIG
    )
    np.testing.assert_array_equal(run.state.master["up"]["kernel"], kernel)


def test_state_is_born_on_its_shards():
    """Fails if initialisation makes whole parameters on any device first."""
    width = 1024

    def init(key):
        return {"w": jax.random.normal(key, (width, width))}

    model = dataclasses.replace(
        models.make_mlp(),
        init=lambda key: (init(key), {}),
        logical=lambda params: {"w": (None, None)},
    )
    plan = runs.make_small_plan(optax.adam(1e-3), 3, model=model)
    tx = optax.adam(1e-3)
    config = runs.make_config(3)

    def create(key):
        return zjax.init_state(key, model, tx, plan, config)

    compiled = jax.jit(create).lower(jax.random.key(0)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * width * width


def test_optimizer_and_schedule_of_the_config_serve_if_none_is_given():
    settings = {
        "optimizer": {"schedule": {"num_warmup_steps": 2}, "peak_learning_rate": 0.5}
    }
    run = zjax.initialize(
        (models.init, models.apply),
        None,
        lambda model, batch, key: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
        models.make_batch(),
        CONFIG | settings,
    )
    state, metrics = run.step(run.state, models.make_batch())
    _, second = run.step(state, models.make_batch(1))
    assert (metrics["learning_rate"], second["learning_rate"]) == (0, 0.25)


@pytest.mark.parametrize(
    ("content", "limit"),
    [
        ('{"train_batch_size": 32}', 1.0),  # the default of DeepSpeed
        ('{"train_batch_size": 32, "gradient_clipping": 1.0}', 1.0),
        ('{"train_batch_size": 32, "gradient_clipping": 0.25}', 0.25),
        ('{"train_batch_size": 32, "gradient_clipping": 0.0}', float("inf")),
        ('{"train_batch_size": 32, "gradient_clipping": "auto"}', float("inf")),
        (None, float("inf")),
    ],
)
def test_clipping_that_is_set_holds_for_an_optimizer_that_is_given(
    content, limit, tmp_path
):
    """Fails if a run of a ds_config does not clip, or another one does unasked."""
    path = tmp_path / "ds_config.json"
    path.write_text(content or "{}")
    batch = models.make_batch()
    pair = {"w": np.zeros((models.WIDTH, models.WIDTH), np.float32)}, models.apply

    def loss_fn(model, batch, key):
        return 100 * jnp.sum(model.args[0]["w"]) * jnp.mean(batch["weight"] ** 0)

    run = zjax.initialize(
        pair, optax.sgd(1.0), loss_fn, batch, path if content else CONFIG
    )
    state, metrics = run.step(run.state, batch)
    norm = 100 * models.WIDTH
    assert metrics["grad_norm"] == norm
    moved = np.linalg.norm(state.master["w"])
    np.testing.assert_allclose(moved, min(norm, limit), rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        ('"train_batch_size": 32', 32),  # also the default of zjax
        ('"train_batch_size": 48, "gradient_accumulation_steps": 2', 48),
        ('"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3', 24),
        ('"train_micro_batch_size_per_gpu": 1', 8),
    ],
)
def test_batch_sizes_that_the_batch_does_not_have_are_refused(sizes, total, tmp_path):
    """Fails if a ds_config trains other rows per step than it says."""
    path = tmp_path / "ds_config.json"
    path.write_text(f"{{{sizes}}}")
    batch = models.make_batch(batch=16)
    for config in (path, zjax.load_config(path)):
        with config_error(
            f"global_batch_size={total} is not the 16 rows of the batch; give batches "
            f"of {total}, or change the batch sizes"
        ):
            zjax.initialize(Tied, optax.sgd(0.1), squared_error, batch, config)


@pytest.mark.parametrize(
    "config",
    [
        '{"train_batch_size": 16, "train_micro_batch_size_per_gpu": "auto"}',
        '{"train_batch_size": "auto", "gradient_accumulation_steps": 1}',
        '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}',
        schema.Config(),
        schema.Config(global_batch_size=0, microbatch_size=1),
    ],
)
def test_batch_sizes_that_are_not_set_are_those_of_the_batch(config, tmp_path):
    if isinstance(config, str):
        path = tmp_path / "ds_config.json"
        path.write_text(config)
        config = path
    batch = models.make_batch(batch=16)
    run = zjax.initialize(Tied, optax.sgd(0.1), squared_error, batch, config)
    assert run.config.global_batch_size == 16


@pytest.mark.parametrize("axis", ["tensor", "expert"])
def test_axes_that_shard_no_parameter_are_told(axis, caplog):
    """They are not refused: functions may compute over them, and rows are split."""
    settings = {"mesh": {axis: 2}}
    zjax.initialize(Tied, optax.sgd(0.1), squared_error, models.make_batch(), settings)
    expected = f"mesh.{axis}=2 shards no dim of a parameter; name dims in mesh.rules"
    assert expected in caplog.messages


@pytest.mark.parametrize(
    ("keys", "message"),
    {
        '"sequence_parallel_size": 2': (
            "mesh.sequence=2 shards no array of the batch; give arrays with a second "
            "dim, or use 1"
        ),
        '"sparse_attention": {"mode": "fixed", "block": 16}': (
            "model.attention='sparse' has no effect on the model that was given; leave "
            "it at 'auto', and call zjax_kernels.sparse_attention in the model"
        ),
        '"pipeline": {"activation_checkpoint_interval": 1}': (
            "model.remat='full' has no effect on the model that was given; leave it at "
            "'elementwise', and wrap blocks in zjax.ops.remat.recompute"
        ),
    }.items(),
)
def test_keys_that_move_nothing_of_a_model_that_is_given_are_refused(
    keys, message, tmp_path
):
    path = tmp_path / "ds_config.json"
    path.write_text(f'{{"train_batch_size": 32, {keys}}}')
    batch = {
        name: x[:, 0] for name, x in models.make_batch().items() if name != "weight"
    }

    def loss_fn(model, batch, key):
        return jnp.mean((model(batch["x"][:, None]) - batch["y"][:, None]) ** 2)

    def make(rngs):
        return nnx.Sequential(nnx.Linear(1, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs))

    with config_error(message):
        zjax.initialize(make, optax.sgd(0.1), loss_fn, batch, path)


def test_keys_that_only_report_are_named(tmp_path, caplog):
    path = tmp_path / "ds_config.json"
    path.write_text(
        '{"train_batch_size": 32, "steps_per_print": 7, '
        '"csv_monitor": {"enabled": true}}'
    )
    batch = models.make_batch()
    zjax.initialize(Tied, optax.sgd(0.1), squared_error, batch, path)
    zjax.initialize(Tied, optax.sgd(0.1), squared_error, batch)
    assert [x.getMessage() for x in caplog.records if "observe" in x.getMessage()] == [
        "observe.sinks=('console', 'jsonl', 'csv'), observe.log_every_steps=7: read by "
        "zjax.Trainer alone; write the metrics that steps return"
    ]


def test_bad_input_is_refused_before_anything_compiles():
    batch = models.make_batch()
    with model_error(
        "loss_fn=None does not say what to train; give loss_fn(model, batch, key), or "
        "a zjax.Model that has its own"
    ):
        zjax.initialize(Tied, optax.sgd(0.1), None, batch)
    with pytest.raises(ConfigError, match=r"zero\.stage=7 is not a choice"):
        zjax.initialize(
            Tied, optax.sgd(0.1), squared_error, batch, {"zero": {"stage": 7}}
        )

    with data_error("batch/x='list' is not an array; use numpy.asarray"):
        zjax.initialize(
            Tied, optax.sgd(0.1), squared_error, {"x": [1.0], "y": batch["y"]}
        )
    with config_error(
        "schedule='given' is the learning rate of tx, which is not given; give tx, or "
        "leave it out and set optimizer.schedule"
    ):
        zjax.initialize(Tied, None, squared_error, batch, schedule=lambda step: 0.1)
    with config_error(
        "optimizer.rule.b1=0.5 has no effect on the optimizer that was given; leave it "
        "at 0.9, or give no optimizer"
    ):
        settings = {"optimizer": {"b1": 0.5}}
        zjax.initialize(Tied, optax.sgd(0.1), squared_error, batch, settings)
    with config_error(
        "model.activation_memory='pinned_host' has no effect on the model that was "
        "given; leave it at 'device', and wrap blocks in zjax.ops.remat.recompute"
    ):
        settings = {"model": {"activation_memory": "pinned_host", "remat": "full"}}
        zjax.initialize(Tied, optax.sgd(0.1), squared_error, batch, settings)
    with config_error(
        "precision.on_nonfinite='stop' is read by zjax.Trainer alone; look at "
        "metrics['skipped_steps'], or leave it at 'skip'\n"
        "evaluation.early_stopping.patience=2 is read by zjax.Trainer alone; call "
        "run.evaluate, or leave it out"
    ):
        settings = {
            "precision": {"on_nonfinite": "stop"},
            "evaluation": {"early_stopping": {"patience": 2}},
        }
        zjax.initialize(Tied, optax.sgd(0.1), squared_error, batch, settings)
    with config_error(
        "precision.max_skipped_in_a_row=5 is read by zjax.Trainer alone; look at "
        "metrics['skipped_steps'], or leave it at 20"
    ):
        settings = {"precision": {"max_skipped_in_a_row": 5}}
        zjax.initialize(Tied, optax.sgd(0.1), squared_error, batch, settings)


def test_a_plan_without_devices_cannot_step():
    mesh = meshes.abstract_mesh(schema.Mesh(), 64)
    config = runs.make_config(3)
    plan = zjax.make_plan(config, mesh, models.make_mlp(), optax.sgd(0.1))
    with plan_error(
        "plan.mesh=(1, 64, 1, 1, 1, 1) is abstract: its devices are not here; make the "
        "plan on zjax.make_mesh"
    ):
        zjax.make_step(models.make_mlp(), optax.sgd(0.1), plan, config)


def test_state_that_does_not_fit_is_refused_with_both_numbers():
    plan = runs.make_small_plan(optax.adam(0.1), 2)
    with plan_error(
        "zero.stage=2 needs 0.0 GB of model state on devices of 0.0 GB; raise "
        "zero.stage, set zero.offload=pinned_host, use more devices, or a smaller model"
    ):
        fit.check_device_memory(plan, 4_000)
    fit.check_device_memory(plan, 1e9)


def test_a_step_refuses_what_the_example_did_not_have():
    """Fails if integers are cut to 32 bits, or a column that lacks is compiled for."""
    batch = models.make_batch()
    run = zjax.initialize(Tied, optax.sgd(0.1), squared_error, batch)
    given = {"x": np.full(batch["x"].shape, 1 << 40), "id": np.zeros(32, np.int32)}
    for call in (run.step, run.evaluate):
        with data_error(
            "batch/x=1099511627776 does not fit 32 bits; renumber it or remove it\n"
            "batch/weight=None is missing; give float32[B]\n"
            "batch/y=None is missing; give float32[B, 16]\n"
            "batch/id='int32[32]' is not read by the loss; leave it out"
        ):
            call(run.state, given)


def test_ids_on_devices_are_checked_where_asked():
    """Fails if the switch does nothing, or is taken for a model that names no ids."""
    batch = models.make_batch()
    settings = {"data.check_ids": "device"}
    with config_error(
        "data.check_ids='device' has no effect: the model says of no array how many "
        "ids there are; leave it at 'host', or set num_ids in the entries of the "
        "zjax.Model"
    ):
        zjax.initialize(Tied, optax.sgd(0.1), squared_error, batch, settings)
    model = zjax.adapt(Tied, squared_error, batch)
    weight = dataclasses.replace(model.entries["weight"], num_ids=4)
    model = dataclasses.replace(model, entries=model.entries | {"weight": weight})
    run = zjax.initialize(model, optax.sgd(0.1), None, batch, settings)
    placed = jax.device_put(batch | {"weight": batch["weight"] + 4})
    with data_error("batch/weight=7 is no id of 4; use 0 to 3"):
        run.step(run.state, placed)


@pytest.mark.parametrize("program", ["step", "evaluate"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_metrics_that_would_be_overwritten_are_refused(program, num_microbatches):
    def loss_fn(model, batch, key):
        loss = squared_error(model, batch, key)
        return loss, 2.0, {"loss": loss, "weight": loss, "other": loss}

    batch, settings = models.make_batch(), {"num_microbatches": num_microbatches}
    run = zjax.initialize(Tied, optax.sgd(0.1), loss_fn, batch, settings)
    with model_error(
        "metrics/loss='float32' has a name of the run's own; give it another name\n"
        "metrics/weight='float32' has a name of the run's own; give it another name"
    ):
        getattr(run, program)(run.state, batch)
