"""Which parameters are frozen, and how they are stored, by the settings of a run."""

import re

from zjax.config import schema
from zjax.config.communication import COMPRESSED_OPTIMIZERS

DEFAULT, FROZEN = "default", "frozen"
Groups = tuple[schema.ParamGroup, ...]


def label_of(path: str, groups: Groups) -> str:
    """Group of a parameter: `default`, `frozen`, or `group_i` for the i-th group.

    The first group whose pattern is found in the path wins.

    Example:
        >>> label_of("head/kernel", (schema.ParamGroup(pattern="^head"),))
        'group_0'
    """
    for index, group in enumerate(groups):
        if re.search(group.pattern, path):
            return f"group_{index}" if group.learning_rate_scale else FROZEN
    return DEFAULT


def frozen_as_masters(config: schema.Config) -> str:
    """The setting under which frozen weights stay float32 masters with gradients.

    Disks, and replicas that take steps of their own, handle all parameters alike.

    Returns:
        The setting and its value as text; empty for no such setting.

    Example:
        >>> frozen_as_masters(schema.Config(zero=schema.Zero(memory="auto")))
        "zero.optimizer_memory='auto'"
    """
    zero = config.zero
    memories = {
        f"zero.{name}_memory": (x, x in ("nvme", "auto"))
        for name in ("optimizer", "parameter", "gradient")
        if (x := getattr(zero, f"{name}_memory"))
    }
    settings = memories | {
        "communication.num_local_steps": (
            config.communication.num_local_steps,
            config.communication.num_local_steps > 0,
        ),
        "optimizer.name": (
            config.optimizer.name,
            config.optimizer.name in COMPRESSED_OPTIMIZERS,
        ),
    }
    return next(
        (f"{k}={value!r}" for k, (value, is_on) in settings.items() if is_on), ""
    )


def is_held_frozen(path: str, config: schema.Config) -> bool:
    """Whether a parameter is stored in the compute dtype, without a gradient.

    With adapters these are all others, but those of `lora.also_train`.

    Args:
        path: Path of the parameter.
        config: Settings of the run.

    Example:
        >>> group = schema.ParamGroup(pattern="^head", learning_rate_scale=0.0)
        >>> config = schema.Config(optimizer=schema.Optimizer(groups=(group,)))
        >>> is_held_frozen("head/kernel", config), is_held_frozen("norm/scale", config)
        (True, False)
    """
    if config.lora.rank and not is_adapter(path):
        patterns = config.lora.also_train
        return not any(re.search(pattern, path) for pattern in patterns)
    groups = config.optimizer.groups
    return label_of(path, groups) == FROZEN and not frozen_as_masters(config)


def is_adapter(path: str) -> bool:
    """Whether a parameter belongs to an adapter of `lora`.

    Example:
        >>> is_adapter("blocks/mlp/up/lora/a"), is_adapter("blocks/mlp/up/kernel")
        (True, False)
    """
    return re.search(r"(^|/)lora/(a|b|magnitude)$", path) is not None
