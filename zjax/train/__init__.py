"""Training as pure functions: the state, the gradients, the update."""

from zjax.train.programs import Programs
from zjax.train.state import TrainState

__all__ = ["Programs", "TrainState"]
