"""Where arrays live: the mesh, the placement rules and the plan."""

from zjax.sharding.mesh import abstract_mesh, make_mesh
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import Plan, make_plan

__all__ = ["ArrayPlan", "Plan", "abstract_mesh", "make_mesh", "make_plan"]
