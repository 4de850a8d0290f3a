"""What a run is told that asks for more memory than its devices have."""

import contextlib
from collections.abc import Iterator

import jax

from zjax.config.batch import resolve_batch
from zjax.config.schema import Config
from zjax.errors import PlanError, Problem
from zjax.sharding.memory import num_zero_shares
from zjax.sharding.mesh import PIPELINE
from zjax.sharding.plan import DEVICE, Plan

_STATUS = "RESOURCE_EXHAUSTED"
_LAST = "use more devices, or a smaller model"


@contextlib.contextmanager
def remedies_told(config: Config, plan: Plan, *, user_model: bool) -> Iterator[None]:
    """Says which settings would need less memory, where a step runs out of it.

    Args:
        config: Of the run.
        plan: Of the run.
        user_model: Whether `config.model` says nothing about the model.

    Yields:
        Nothing.

    Raises:
        PlanError: In place of the error of JAX, which it quotes.
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
    if config.zero.optimizer_memory == DEVICE:
        yield "zero.optimizer_memory=pinned_host"
    elif config.zero.parameter_memory == DEVICE and not user_model:
        yield "zero.parameter_memory=pinned_host"
