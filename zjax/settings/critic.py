"""Settings of a separate critic, which follow from the settings of the policy."""

import dataclasses

from zjax.settings import rl, schema


def critic_settings(config: schema.Config) -> schema.Config:
    """Returns the settings of the critic's run: the policy's, but for its start.

    Example:
        >>> given = {"rl": {"objective": "ppo", "critic": "own"}}
        >>> import zjax
        >>> critic_settings(zjax.load_config(given)).model.value_head
        True
    """
    assert config.rl is not None and isinstance(config.rl.critic, rl.Own)
    given, start, optimizer = config.rl.critic, config.checkpoint, config.optimizer
    if given.init_from:
        start = dataclasses.replace(
            start,
            init_from=given.init_from,
            resize_vocabulary=False,
            expert_noise=0.0,
        )
    rate = given.peak_learning_rate or optimizer.peak_learning_rate
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, value_head=True),
        # The values are those of the model itself: no further critic stands beside.
        rl=dataclasses.replace(config.rl, critic=rl.Shared()),
        # No evaluation reads values: an average would take memory for nothing.
        optimizer=dataclasses.replace(
            optimizer, peak_learning_rate=rate, ema_decay=0.0
        ),
        checkpoint=start,
        lora=None,
    )
