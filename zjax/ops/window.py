"""A growing attention window, and the plan of the kernels for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int

from zjax_kernels import Plan

PlanMaker = Callable[[int, Int[Array, ""]], Plan]
"""`make_plan(length, size)`: the plan of `length` tokens under a window; hashable."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """Keys that a token sees, from its own position back.

    It may be traced: one program runs all sizes. Made outside of a loop over layers,
    its plan is made once for all of them.

    Args:
        size: int32[], number of keys, 1 or more.
        plan: Plan of the kernels for this size; None where other kernels run.
        make_plan: Makes it for other numbers of tokens; None where other kernels run.

    Example:
        >>> window = Window(jax.numpy.int32(3))
        >>> window.on_tokens(8).plan is None
        True
    """

    size: Any  # leaves are shapes or shardings, too, in trees of those
    plan: Any = None
    make_plan: PlanMaker | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def on_tokens(self, length: int) -> "Window":
        """The window over another number of tokens."""
        if self.make_plan is None:
            return self
        plan = self.make_plan(length, self.size)
        return dataclasses.replace(self, plan=plan)
