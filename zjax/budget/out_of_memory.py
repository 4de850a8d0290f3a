"""The error of a step that runs out of device memory, with settings that need less."""

import contextlib
from collections.abc import Iterator

import jax

from zjax.config.batch import resolve_batch
from zjax.config.schema import Config
from zjax.errors import PlanError, Problem
from zjax.sharding.memory import num_zero_shares
from zjax.sharding.mesh import PIPELINE
from zjax.sharding.plan import Plan

_STATUS = "RESOURCE_EXHAUSTED"
_LAST = "use more devices, or a smaller model"


@contextlib.contextmanager
def explain_out_of_memory(
    config: Config, plan: Plan, *, user_model: bool
) -> Iterator[None]:
    """Turns JAX's error of exhausted memory into one that names smaller settings.

    Args:
        config: Settings of the run.
        plan: Plan of the run.
        user_model: Whether the model is not that of `config.model`.

    Yields:
        Nothing.

    Raises:
        PlanError: A step inside runs out of memory; quotes JAX.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said, _, _ = str(error).partition("\n")
        if _STATUS not in said:
            raise
        _, _, cause = said.partition(f"{_STATUS}: ")
        size = resolve_batch(config, plan.num_batch_shares).microbatch_size
        problem = f"takes more memory than devices have ({cause.rstrip('.')})"
        settings = " or ".join(_settings(config, plan, size, user_model))
        remedy = f"set {settings}, or {_LAST}" if settings else _LAST
        raise PlanError(Problem("microbatch_size", size, problem, remedy)) from error


def _settings(config: Config, plan: Plan, size: int, user_model: bool) -> Iterator[str]:
    if size > 1:
        yield f"microbatch_size={size // 2} (the batch stays, in more microbatches)"
    if not user_model and config.model.remat != "full":
        yield "model.remat=full"
    if not plan.splits.compute and num_zero_shares(plan) > 1:
        yield "zero.stage=3"
    if plan.mesh.shape[PIPELINE] > 1:
        return  # stages stay where they are
    if not config.zero.offloads_state:
        yield "zero.optimizer_memory=pinned_host"
    elif not (config.zero.offloads_blocks or user_model):
        yield "zero.parameter_memory=pinned_host"
