"""Old names of `zjax.sharding.program_plan`, until all callers have moved."""

from zjax.sharding.program_plan import layerwise_plan as plan_in_use
from zjax.sharding.program_plan import staged_plan as plan_on_device

__all__ = ["plan_in_use", "plan_on_device"]
