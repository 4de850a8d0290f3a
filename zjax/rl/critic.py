"""A separate critic: a decoder whose loss is the loss of its values."""

from zjax.errors import ConfigError, Problem
from zjax.models.build import make_model
from zjax.rl.objective import Value, value_sums
from zjax.rl.policy import on_packed_rows, policy_problems
from zjax.settings.schema import Config
from zjax.stack.forward import with_stack
from zjax.typing import Model


def critic_model(config: Config, value: Value) -> Model:
    """Makes the decoder of `config.model` with the loss of a separate critic.

    Args:
        config: Settings, as for `zjax.make_model`, with `model.value_head`.
        value: The loss; alone it has no weight.

    Returns:
        The model, for batches of `zjax.rl.pack` with `values` and `returns` under `rl`.

    Raises:
        ConfigError: The model has no head of values, or is not fit for a policy.

    Example:
        >>> import zjax
        >>> config = zjax.load_config({"model": {"value_head": True}})
        >>> "rl/returns" in critic_model(config, Value()).entries
        True
    """
    problems = policy_problems(config)
    if not config.model.value_head:
        problem, remedy = "has no values for a critic", "use True"
        problems += [Problem("model.value_head", False, problem, remedy)]
    if problems:
        raise ConfigError(*problems)
    model = make_model(config)
    assert model.stack is not None
    read_values = model.stack.values
    assert read_values is not None  # of a model with a head of values

    def head(params, carry, batch):
        return value_sums(value, read_values(params, carry), batch)

    model = with_stack(model, head=head)
    return on_packed_rows(model, config, ["values", "returns"])
