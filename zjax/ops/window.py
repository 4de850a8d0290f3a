"""A growing attention window, and the plan of the kernels for the window."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int

from zjax_kernels import Plan

PlanMaker = Callable[[int, Int[Array, ""]], Plan]
"""`make_plan(length, size)` plans `length` tokens under a window; hashable."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """Keys that a token sees, back from the position of the token.

    The size may be traced: one program runs all sizes. A window made outside of a loop
    over layers makes one plan for all layers.

    Args:
        size: int32[], number of keys, 1 or more.
        plan: Plan of the kernels for this size; None where other kernels run.
        make_plan: Function that plans another number of tokens; None where other
            kernels run.

    Example:
        >>> window = Window(jax.numpy.int32(3))
        >>> window.on_tokens(8).plan is None
        True
    """

    size: Any  # JAX also builds windows of shapes or shardings
    plan: Any = None
    make_plan: PlanMaker | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def on_tokens(self, length: int) -> "Window":
        """Plans the window over another number of tokens."""
        if self.make_plan is None:
            return self
        plan = self.make_plan(length, self.size)
        return dataclasses.replace(self, plan=plan)
