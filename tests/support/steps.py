"""The step of a run without its state, for what is read off its programs."""

import zjax
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.sharding.mesh import make_mesh
from zjax.sharding.plan import make_plan


def make_step(config, devices=None, model=None):
    model = make_model(config) if model is None else model
    tx, mesh = make_optimizer(config, model), make_mesh(config.mesh, devices)
    return zjax.make_step(model, tx, make_plan(config, mesh, model, tx), config)
