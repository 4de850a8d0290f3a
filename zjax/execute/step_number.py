"""The number of a step on the host, without waiting for the step before."""

from zjax.train.state import TrainState


class StepNumber:
    """Counts along while a state passes from step to step; reads it from others."""

    def __init__(self):
        self._step, self._number = None, 0

    def knows(self, state: TrainState) -> bool:
        """Whether a state is that of the step before, not one from elsewhere."""
        return state.step is self._step

    def before(self, state: TrainState) -> int:
        """Number of steps that a state has taken."""
        if not self.knows(state):
            self._step, self._number = state.step, int(state.step)
        return self._number

    def after(self, state: TrainState, number: int) -> None:
        """Notes the number of steps that a new state has taken."""
        self._step, self._number = state.step, number
