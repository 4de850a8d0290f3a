"""A step that learns from a teacher until its stage ends."""

import jax

from zjax.dropping import split_dropping
from zjax.execute.executor import Executor
from zjax.execute.extended import ExtendedExecutor
from zjax.execute.teacher import Teacher
from zjax.typing import Batch


class DistilledExecutor(ExtendedExecutor):
    """Adds what a teacher says to the batches of the first steps.

    Later steps run the programs of a run without a teacher.

    Args:
        executor: Runs the student.
        teacher: The teacher; its parameters come on top of the predicted memory.
        num_steps: Steps that learn from it.
    """

    def __init__(self, executor: Executor, teacher: Teacher, num_steps: int):
        super().__init__(executor)
        self.teacher, self.num_steps = teacher, num_steps

    def extend(self, batch: Batch, number: int) -> Batch:
        """Adds the teacher's logits, or frees its memory."""
        if number <= self.num_steps:
            return self.teacher.teach(batch)
        self.teacher.release()
        return batch

    def abstract(self, batch: Batch, number: int = 1) -> Batch:
        """Shapes of a batch with the teacher's logits, if the step has a teacher."""
        return self.teacher.abstract(batch) if number <= self.num_steps else batch

    def compile(
        self, program: str, batch: Batch, number: int = 1
    ) -> jax.stages.Compiled:
        """Compiles one of `programs`, and the teacher's for the step."""
        if program != "evaluate" and number <= self.num_steps:
            self.teacher.compile(split_dropping(batch)[0])
        return super().compile(program, batch, number)
