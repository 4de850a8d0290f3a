"""The policy: a decoder whose head has the objective as its loss, and `logprobs_of`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zjax.errors import ConfigError, Problem
from zjax.models.build import make_model
from zjax.ops.target_logprobs import TargetLogprobs
from zjax.rl.logprobs import token_logprobs
from zjax.rl.masks import at_least_float32
from zjax.rl.objective import Objective, ObjectiveSums, objective_sums, value_sums
from zjax.rl.pretraining_loss import KEY, add_pretraining
from zjax.rl.ranges import check_above_zero
from zjax.run.build import Run
from zjax.settings import schema
from zjax.settings.mixture import mixture_places, noise_of_routing, sees_future
from zjax.settings.schema import Config
from zjax.stack.forward import with_stack
from zjax.train.state import TrainState
from zjax.typing import IGNORED, Batch, Entry, Metrics, Model

ARRAYS = (
    *("advantages", "logprobs", "units", "old_logprobs", "reference_logprobs"),
    *("values", "returns", KEY),
)
"""Arrays [B, L] under `rl` of a batch."""


def policy_model(config: Config, objective: Objective) -> Model:
    """Makes the decoder of `config.model` with a policy's objective as its loss.

    Log-probabilities and entropies are computed in chunks of `model.loss_chunk_tokens`,
    so that no array has the size of tokens times vocabulary. Batches are those of
    `zjax.rl.pack`; the loss and the metrics are those of `objective_sums`, and do not
    depend on microbatches or the mesh.

    Args:
        config: Settings, as for `zjax.make_model`.
        objective: The loss.

    Returns:
        The model. `zjax.initialize` and `zjax.Trainer` need a batch of `pack`, or its
        shapes, as an example.

    Raises:
        ConfigError: The model is no decoder or lets tokens see later ones, or a setting
            makes the policy that is trained another one than the sampler's: dropout,
            dropped tokens and dropped layers.

    Example:
        >>> from zjax import Config
        >>> sorted(policy_model(Config(), Objective()).entries)[2:5]
        ['rl/advantages', 'rl/logprobs', 'rl/old_logprobs']
    """
    problems = policy_problems(config)
    if objective.value and not config.model.value_head:
        problem, remedy = "has no values for the objective", "use True"
        problems += [Problem("model.value_head", False, problem, remedy)]
    if problems:
        raise ConfigError(*problems)
    model = make_model(config)
    assert model.stack is not None
    score = model.stack.target_logprobs
    assert score is not None  # of a decoder

    read_values, value = model.stack.values, objective.value
    ptx_weight = objective.pretraining_weight

    def head(params, carry, batch):
        found = score(params, carry, batch["targets"], objective.temperature)
        sums = objective_sums(objective, found.logprobs, found.entropies, batch)
        if value and read_values:
            added = value_sums(value, read_values(params, carry), batch)
            loss_sum = sums.loss_sum + value.weight * added.loss_sum
            sums = ObjectiveSums(loss_sum, sums.weight, sums.metrics | added.metrics)
        if not ptx_weight:
            return sums
        if objective.temperature != 1:  # of the rollout, and pre-training has none
            found = score(params, carry, batch["targets"], 1.0)
        return add_pretraining(ptx_weight, sums, found.logprobs, batch)

    needed = ["advantages", "logprobs"]
    needed += ["reference_logprobs"] if objective.kl else []
    needed += ["values", "returns"] if value else []
    needed += [KEY] if ptx_weight else []
    return on_packed_rows(with_stack(model, head=head), config, needed)


def on_packed_rows(model: Model, config: Config, needed: Sequence[str]) -> Model:
    """Makes a decoder read packed rows, of which it needs some arrays under `rl`."""
    array = Entry(("B", "L"), jnp.floating)
    optional = dataclasses.replace(array, is_optional=True)
    entries = {k: v for k, v in model.entries.items() if not k.startswith("teacher/")}
    entries |= {
        "weights": dataclasses.replace(entries["weights"], is_optional=False),
        **{f"rl/{name}": optional for name in ARRAYS},
        **{f"rl/{name}": array for name in needed},
    }
    if sizes := sizes_of_experts(config.model):
        entries["experts"] = Entry(("B", "L", *sizes), np.integer, is_optional=True)
    row = jax.ShapeDtypeStruct((1, config.data.length), jnp.float32)
    arrays = {"weights": row, "rl": dict.fromkeys(needed, row)}
    return dataclasses.replace(
        model, entries=entries, inputs={**(model.inputs or {}), **arrays}
    )


def sizes_of_experts(model: schema.Model) -> tuple[int, ...]:
    """Numbers of layers with experts and of experts of a token; nothing without."""
    if not isinstance(moe := model.moe, schema.TokenChoice):
        return ()
    return len(mixture_places(model)), moe.top_k


def policy_loss(
    logits: Float[Array, "B L V"], batch: Mapping[str, Any], objective: Objective
) -> tuple[Float[Array, ""], Float[Array, ""], Metrics]:
    """Computes the loss of a policy from the logits of any model.

    Args:
        logits: Logits of the next token at each position, of any float dtype.
        batch: Arrays of `zjax.rl.pack`, with `shares_rows=False` for a model that reads
            no `segment_ids`.
        objective: The loss.

    Returns:
        Mean loss, weight and metrics, as a `loss_fn` of `zjax.initialize` returns them:
        the loss of a step does not depend on microbatches or devices.

    Raises:
        ConfigError: The objective has a divergence, and the batch no reference.

    Example:
        >>> ones = jnp.ones((1, 2))
        >>> given = {"advantages": ones, "logprobs": -ones}
        >>> batch = {"targets": jnp.array([[1, -100]]), "weights": ones, "rl": given}
        >>> loss, weight, _ = policy_loss(jnp.zeros((1, 2, 4)), batch, Objective())
        >>> float(loss), float(weight)
        (-1.0, 1.0)
    """
    found = logits_scores(logits, batch["targets"], objective.temperature)
    sums = objective_sums(objective, found.logprobs, found.entropies, batch)
    if weight := objective.pretraining_weight:
        plain = logits_scores(logits, batch["targets"], 1.0)
        sums = add_pretraining(weight, sums, plain.logprobs, batch)
    # A microbatch of padding has weight 0, and must give 0 instead of NaN.
    divisor = jnp.where(sums.weight > 0, sums.weight, 1.0)
    metrics = {name: x / divisor for name, x in sums.metrics.items()}
    return sums.loss_sum / divisor, sums.weight, metrics


def values_of(run: Run, state: TrainState, batch: Batch) -> Float[Array, "B L"]:
    """Computes the value of each token of a batch, in a forward pass.

    Args:
        run: Run of a model with a head of values (`model.value_head`).
        state: State of the run, whose current weights are read; not consumed.
        batch: Batch of the run's model.

    Returns:
        Values on every device. At the place of a completion's token in `Packed` is the
        value before the token is drawn.

    Raises:
        DataError: The batch lacks what the model requires.
        ModelError: The model has no values.
        PlanError: Rows do not divide over devices and microbatches.
        StateError: The state was consumed before.
    """
    return run.token_scores.values(state, run.step.place_batch(batch))


def logprobs_of(
    run: Run, state: TrainState, batch: Batch, *, temperature: float = 1.0
) -> Float[Array, "B L"]:
    """Computes the log-probability of each target of a batch, in a forward pass.

    Microbatches, kernels and dtypes are those of a step. An average of the weights is
    not read: the current weights learn, and draw the next tokens.

    Args:
        run: Run of any decoder, or of another stack with `target_logprobs`.
        state: State of the run; not consumed.
        batch: Batch of the run's model, with `targets` int32[B, L], -100 for none.
        temperature: Divisor of the logits, above 0.

    Returns:
        Log-probabilities on every device; 0 for targets of -100.

    Raises:
        ConfigError: The temperature is not above 0.
        DataError: The batch lacks what the model requires.
        ModelError: The model does not know log-probabilities of targets.
        PlanError: Rows do not divide over devices and microbatches.
        StateError: The state was consumed before.
    """
    check_above_zero(temperature=temperature)
    placed = run.step.place_batch(batch)
    return run.token_scores.logprobs(state, placed, temperature=temperature)


def logits_scores(
    logits: Float[Array, "B L V"], targets: Any, temperature: float
) -> TargetLogprobs:
    """Returns log-probabilities of targets and entropies, 0 for targets of -100."""
    mask = targets != IGNORED
    logprobs = token_logprobs(logits, targets, mask, temperature=temperature)
    logits = jnp.where(mask[..., None], at_least_float32(logits), 0)
    log_softmax = jax.nn.log_softmax(logits / temperature)
    entropies = -(jnp.exp(log_softmax) * log_softmax).sum(-1)
    return TargetLogprobs(logprobs, jnp.where(mask, entropies, 0))


def policy_problems(config: Config) -> list[Problem]:
    """Lists settings under which the trained policy is not the sampler's."""
    model, problems = config.model, []
    if model.kind != "decoder":
        problem, remedy = "writes no text", "use 'decoder'"
        problems += [Problem("model.kind", model.kind, problem, remedy)]
    elif sees_future(model):
        problem = "lets a token see later tokens, which a sampler has not drawn"
        problems += [
            Problem("model.moe", "expert_choice", problem, "use 'token_choice'")
        ]
    names = ("dropout_rate", "embedding_dropout_rate", "attention_dropout_rate")
    problem = "changes log-probabilities that the sampler drew tokens by"
    problems += [
        Problem(f"model.{name}", rate, problem, "use 0")
        for name in names
        if (rate := getattr(model, name)) > 0
    ]
    problems += [
        Problem(field, value, problem, "leave it out")
        for field, value in noise_of_routing(model).items()
    ]
    for name in ("random_ltd", "layer_drop", "distill"):
        if getattr(config, name):
            remedy = "leave it out"
            text = problem if name != "distill" else "is not read by a policy"
            problems += [Problem(name, "given", text, remedy)]
    return problems
