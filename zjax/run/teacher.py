"""Frozen decoder that teaches a student by distillation.

The teacher's forward pass is a separate program, and the logits join the batch of the
student. Programs of the student, split or streamed, need no change.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.checkpoint.contents import digest_step
from zjax.checkpoint.start import open_run, place_weights
from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.config.load import saved_config
from zjax.errors import CheckpointError, ConfigError, Problem
from zjax.files import local_path
from zjax.models.build import make_model
from zjax.models.stack import StackedModel, execution_of
from zjax.parallel import sequence
from zjax.run.compiler import step_options
from zjax.run.fused import make_jit
from zjax.run.teacher_states import (
    Targets,
    run_with_layers,
    state_problems,
    targets_of,
)
from zjax.schedule.training import NOTHING, Told
from zjax.settings import schema
from zjax.settings.batch import resolve_batch
from zjax.settings.distill import ForwardKl
from zjax.settings.mixture import sees_future
from zjax.sharding.activations import batch_shardings
from zjax.sharding.layers import take_apart
from zjax.sharding.placement import abstract_key, place_tree, unpad_tree
from zjax.sharding.plan import Plan, layerwise_plan, make_plan
from zjax.stack.forward import run_stack
from zjax.storage.move import store, to_devices
from zjax.train.microbatches import split_batch
from zjax.typing import Batch, Model, Params

NAME = "teacher"


class Teacher:
    """Trained decoder whose logits are added to each batch of the student.

    Matrices are rounded in each pass as the teacher's run has learned them. Parameters
    are read at the first batch, and again after `release`.

    Raises:
        CheckpointError: `distill.teacher` is not the directory of a run, or the saved
            weights do not fit the saved model.
        ConfigError: The teacher is no decoder, has another vocabulary or reads shorter
            sequences; or the student reads no teacher.
    """

    def __init__(self, config: schema.Config, plan: Plan, student: Model):
        settings = config.distill
        assert settings is not None
        self.settings = settings
        self._path = settings.teacher
        checkpoints = _open(self._path)
        saved = saved_config(checkpoints.extra())
        shape, student_config = saved.model, config
        problems = _misfits(shape, self._path, config, student)
        if problems:
            raise ConfigError(*problems)
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(
                shape,
                layers_per_scan=config.model.layers_per_scan,
                activation_memory="device",
            ),
            optimizer=schema.Optimizer(),
            zero=_zero(config.zero, settings.memory),
            # `open_run` merges adapters, into matrices that it has rounded.
            quantize=None if saved.lora else saved.quantize,
            lora=None,
            distill=None,
        )
        self._model = make_model(config)
        self._shape = config.model
        # A teacher is never updated: set_to_zero has no optimizer state to place.
        self._plan = make_plan(config, plan.mesh, self._model, optax.set_to_zero())
        self.rows = jax.tree.map(
            lambda row: row.stored_in(settings.memory), self._plan.compute
        )
        self._checkpoint = checkpoints
        self._source = open_run(checkpoints)
        # Refuses wrong names and shapes early.
        place_weights(self._source, self.rows, self._path)
        self._num_microbatches = resolve_batch(
            config, plan.num_batch_shares
        ).num_microbatches
        self._student = student
        jit = make_jit(plan.mesh, step_options(config, plan))
        self._run = {
            told: jit(functools.partial(self._apply, told))
            for told in itertools.starmap(
                Told, itertools.product((False, True), repeat=2)
            )
        }
        self._config = student_config
        self._params: Params | None = None

    @property
    def digest(self) -> str:
        """Digest of the newest checkpoint, and of the dtype of the pass."""
        step = self._checkpoint.latest()
        assert step is not None
        found = digest_step(self._checkpoint.path(step))
        return f"{found[:16]}-{self._config.precision.compute_dtype}"

    @property
    def params(self) -> Params:
        """Stored parameters of the teacher in the compute dtype, read at first use."""
        if self._params is None:
            on_device = jax.tree.map(lambda row: row.on_device, self.rows)
            arrays = place_weights(self._source, on_device, self._path)
            rows = jax.tree.leaves(self.rows)
            stored = [store(x, row) for x, row in zip(arrays, rows, strict=True)]
            self._params = jax.tree.unflatten(jax.tree.structure(self.rows), stored)
        return self._params

    def release(self) -> None:
        """Frees the memory of the parameters."""
        self._params = None

    def teach(self, batch: Batch, told: Told = NOTHING) -> Batch:
        """Adds the two factors of the teacher's logits to a batch on the devices.

        With `told` also what layers of the student shall reach.
        """
        # The next batch reads the stored parameters again: do not consume them.
        params = jax.tree.map(
            lambda x, row: to_devices(x, row, is_consumed=False), self.params, self.rows
        )
        # Logits [B, L, V] would take far more memory than the factors hidden and head.
        return self._joined(batch, self._run[told](params, batch))

    def compile(self, batch: Batch, told: Told = NOTHING) -> None:
        """Compiles the program of `teach` for the shapes of a batch."""
        self._run[told].lower(self._abstract_params, batch).compile()

    def abstract(self, batch: Batch, told: Told = NOTHING) -> Batch:
        """Shapes of the results of `teach`, from the shapes of a batch."""
        apply = functools.partial(self._apply, told)
        shapes = self._joined(
            batch, jax.eval_shape(apply, self._abstract_params, batch)
        )
        places = batch_shardings(self._plan, shapes, self._student.entries)
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            places,
        )

    @property
    def _abstract_params(self) -> Params:
        return jax.tree.map(lambda row: row.on_device.abstract, self.rows)

    @functools.cached_property
    def _targets(self) -> Targets:
        """Layers and channels of the teacher that the student's blocks shall reach."""
        return targets_of(self._config, self._shape, self._path)

    def _joined(self, batch: Batch, told: dict[str, Any]) -> Batch:
        """Adds what the teacher told, loss weight and temperature to a batch."""
        return batch | {NAME: told | scalars_of(self.settings, self._plan)}

    def _apply(self, told: Told, stored: Params, batch: Batch) -> dict[str, jax.Array]:
        """Computes the factors of the logits, microbatch by microbatch."""
        stack, layerwise = self._model.stack, layerwise_plan(self._model, self._plan)
        assert stack is not None and stack.factors is not None
        params = unpad_tree(stored, self._plan.compute)
        params = place_tree(take_apart(params, layerwise.compute), layerwise.compute)
        execution = execution_of(self._shape)

        def run(part: Batch) -> dict[str, jax.Array]:
            if not any(told):
                return {"hidden": run_stack(stack, params, part, None, execution)[0]}
            decoder = self._model.bind(params, {})
            given = decoder, params, part, self._targets, told
            carry, found = run_with_layers(*given)
            restore = functools.partial(sequence.restore, config=self._shape)
            return {"hidden": carry, **jax.tree.map(restore, found)}

        number, shares = self._num_microbatches, self._plan.num_batch_shares
        read = {name: x for name, x in batch.items() if name in self._model.entries}
        parts = split_batch(read, self._model, number, shares)
        if number == 1:
            found = run(jax.tree.map(lambda x: x[0], parts))
        else:  # row i is in microbatch i mod N
            found = jax.tree.map(
                lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]),
                jax.lax.map(run, parts),
            )
        factors = stack.factors(stack.split(params)[2], found["hidden"])
        found["hidden"], head = factors
        head = jax.lax.with_sharding_constraint(head, self._plan.replicated)
        for name, x in found.items():
            place = self._plan.batch_sharding(x)
            found[name] = jax.lax.with_sharding_constraint(x, place)
        return found | {"head": head}


def scalars_of(settings: schema.Distill, plan: Plan) -> dict[str, jax.Array]:
    """Places the weight of the divergence and the temperature on all devices."""
    return {
        name: jax.device_put(jnp.float32(getattr(settings, name)), plan.replicated)
        for name in ("weight", "temperature")
    }


def _open(path: str) -> Store:
    """Opens the checkpoints of the teacher's run."""
    place = pathlib.Path(local_path("distill.teacher", path, CheckpointError))
    steps = find_steps(place)
    if steps is None:
        problem, remedy = "holds no checkpoint", "give the directory of a run"
        raise CheckpointError(Problem("distill.teacher", path, problem, remedy))
    return Store(str(steps))


def divergence_problems(settings: schema.Distill, student: Model) -> Iterator[Problem]:
    """Yields a divergence that only the loss of a built-in model computes."""
    if isinstance(settings.divergence, ForwardKl):
        return
    module = student.bind(*jax.eval_shape(student.init, abstract_key()))
    if not isinstance(module, StackedModel):
        kind = settings.divergence.kind
        problem = "is not read by the loss of a model that zjax has not made"
        remedy = "use 'forward_kl' and compute it in the loss, or a built-in model"
        yield Problem("distill.divergence", kind, problem, remedy)


def _zero(student: schema.Zero, memory: str) -> schema.Zero:
    """ZeRO settings of the teacher: offloaded parameters are sharded.

    Programs read offloaded parameters only after a transfer to the devices.
    """
    stage = student.stage if memory == "device" else 3
    return schema.Zero(stage=stage, min_shard_elements=student.min_shard_elements)


def _misfits(
    teacher: schema.Model, path: str, config: schema.Config, student: Model
) -> list[Problem]:
    """Lists reasons why a teacher cannot teach the student."""

    def problem(text: str, remedy: str) -> Problem:
        return Problem("distill.teacher", path, text, remedy)

    if f"{NAME}/hidden" not in student.entries:
        return [
            problem(
                "has no effect on a model whose entries lack 'teacher/hidden'",
                "use a built-in model, or read batch['teacher'] in the loss",
            )
        ]
    assert config.distill is not None
    problems = [*divergence_problems(config.distill, student)]
    if teacher.kind != "decoder":
        problems.append(problem(f"is an {teacher.kind}", "use a decoder"))
    if teacher.logit_soft_cap:
        text = f"bounds its logits by {teacher.logit_soft_cap}"
        problems.append(problem(text, "use a decoder of logit_soft_cap=0"))
    if sees_future(teacher):
        text = "has model.moe='expert_choice', and sees later tokens"
        problems.append(problem(text, "use a teacher whose tokens choose"))
    problems += state_problems(config, teacher, path, student)
    size = student.entries[f"{NAME}/head"].shape
    assert size is not None
    if teacher.vocab_size != size[0]:
        text = f"has {teacher.vocab_size} tokens, and the model {size[0]}"
        problems.append(problem(text, "use a teacher of the same vocabulary"))
    length = config.data.length
    if isinstance(teacher.positions, schema.Learned) and teacher.max_length < length:
        text = f"reads {teacher.max_length} tokens, and data.length={length}"
        problems.append(problem(text, "use a teacher of longer sequences"))
    return problems
