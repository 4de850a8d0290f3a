"""An objective on examples as the loss of a decoder, or of logits of any model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zjax.data.example_rows import DESIRABLE, EXAMPLES, REFERENCE
from zjax.errors import ConfigError, Problem
from zjax.models.build import make_model
from zjax.rl.comparisons import DIVERGENCE, comparison_sums, reward_sums
from zjax.rl.logprobs import token_logprobs
from zjax.settings.preference import Kto, Preference, RewardModel
from zjax.settings.schema import Config
from zjax.stack.forward import with_stack
from zjax.typing import IGNORED, Entry, Metrics, Model


def preference_loss(
    logits: Float[Array, "B L V"], batch: Mapping[str, Any], objective: Preference
) -> tuple[Float[Array, ""], Float[Array, ""], Metrics]:
    """Computes the loss of an objective from the logits of any model.

    Args:
        logits: Logits of the next token at each position, of any float dtype.
        batch: `targets` int32[B, L], `weights` float32[B, L] (0 for targets of no
            completion) and `segment_ids` int32[B, L]; `examples` int32[B, P, K], the
            segment of completion k of example p in the row, the best first, 0 where
            there is none; `reference_logprobs` float32[B, P, K], where the objective
            reads them.
        objective: Objective other than `reward_model` and `kto`, such as
            `config.preference`.

    Returns:
        Mean loss, weight and metrics, as a `loss_fn` of `zjax.initialize` returns them:
        the loss of a step does not depend on microbatches or devices.

    Example:
        >>> from zjax.settings.preference import Simpo
        >>> batch = {
        ...     "targets": jnp.array([[1, 2]]),
        ...     "weights": jnp.ones((1, 2)),
        ...     "segment_ids": jnp.array([[1, 2]]),
        ...     "examples": jnp.array([[[1, 2]]]),
        ... }
        >>> logits = jnp.log(jnp.array([[[0.1, 0.8, 0.1]] * 2]))
        >>> loss, weight, _ = preference_loss(logits, batch, Simpo(gamma=0.0))
        >>> f"{jnp.exp(-loss):.4f}", float(weight)  # 0.8 against 0.1, to the power 2
        ('0.9846', 1.0)
    """
    mask = batch["weights"] > 0
    logprobs = token_logprobs(logits, batch["targets"], mask)
    sums = comparison_sums(objective, logprobs, batch)
    # A microbatch of padding has weight 0, and must give 0 instead of NaN.
    divisor = jnp.where(sums.weight > 0, sums.weight, 1.0)
    metrics = {name: x / divisor for name, x in sums.metrics.items()}
    return sums.loss_sum / divisor, sums.weight, metrics


def preference_model(config: Config) -> Model:
    """Makes the decoder of `config.model` with `config.preference` as its loss.

    Log-probabilities are computed in chunks of `model.loss_chunk_tokens`, so that no
    array has the size of tokens times vocabulary. A row holds whole examples: loss and
    metrics do not depend on microbatches or the mesh.

    Args:
        config: Settings, as for `zjax.make_model`, with `preference`.

    Returns:
        The model, whose batches are rows of prepared examples, for
        `zjax.rl.PreferenceTrainer`.

    Raises:
        ConfigError: There is no `preference`.

    Example:
        >>> from zjax import load_config
        >>> model = preference_model(load_config({"preference": "dpo"}))
        >>> "examples" in model.entries
        True
    """
    objective = config.preference
    if objective is None:
        problem, remedy = "compares no completions", "choose an objective, such as dpo"
        raise ConfigError(Problem("preference", None, problem, remedy))
    model = make_model(config)
    stack = model.stack
    assert stack is not None and stack.target_logprobs is not None  # a decoder's
    score, read_values = stack.target_logprobs, stack.values

    def head_of_texts(params, carry, batch):
        targets = jnp.where(batch["weights"] > 0, batch["targets"], IGNORED)
        logprobs = score(params, carry, targets, 1.0).logprobs
        return comparison_sums(objective, logprobs, batch)

    def head_of_rewards(params, carry, batch):
        # `preference=reward_model` turns `model.value_head` on.
        assert read_values is not None and isinstance(objective, RewardModel)
        return reward_sums(objective, read_values(params, carry), batch)

    head = head_of_rewards if objective.has_rewards else head_of_texts
    entries = {k: v for k, v in model.entries.items() if not k.startswith("teacher/")}
    for name in ("weights", "segment_ids", "positions"):
        entries[name] = dataclasses.replace(entries[name], is_optional=False)
    of_completions = ("B", "P", "K")
    entries[EXAMPLES] = Entry(of_completions, np.integer, may_be_negative=False)
    if objective.reads_reference:
        entries[REFERENCE] = Entry(of_completions, jnp.floating)
    if isinstance(objective, Kto):
        entries[DESIRABLE] = Entry(("B", "P"), np.integer, num_ids=2)
        entries[DIVERGENCE] = Entry((), jnp.floating, is_optional=True)
    return dataclasses.replace(
        with_stack(model, head=head),
        entries=entries,
        # A batch of tokens alone is no example of what the loss reads.
        inputs=None,
    )
