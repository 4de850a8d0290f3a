"""Costs of a training step, counted in the traced program of the loss."""

from zjax.jaxprs.flops import Flops
from zjax.models.flops import flops_per_row
from zjax.settings import schema
from zjax.settings.parameters import is_held_frozen
from zjax.typing import Batch, Model


def run_flops(model: Model, batch: Batch, config: schema.Config) -> Flops:
    """Counts the FLOPs of a training step of a run per row of a batch.

    Example:
        >>> from zjax.models.build import make_model
        >>> def work(lora):
        ...     config = schema.Config(lora=lora)
        ...     model = make_model(config)
        ...     return run_flops(model, model.inputs, config).products
        >>> round(work(schema.Lora(rank=1)) / work(None), 2)  # frozen matrices
        0.66
    """
    return flops_per_row(model, batch, lambda path: not is_held_frozen(path, config))
