"""Where arrays live: the mesh, the placement rules and the plan."""

from zjax.sharding.mesh import abstract_mesh, make_mesh
from zjax.sharding.placement import Row
from zjax.sharding.plan import Plan, make_plan

__all__ = ["Plan", "Row", "abstract_mesh", "make_mesh", "make_plan"]
