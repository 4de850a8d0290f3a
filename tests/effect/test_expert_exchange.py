"""Devices hold their part of the experts, and exchange what the formula says."""

import collections

import jax
import optax
import pytest

from tests.support import experts, runs
from zjax.errors import PlanError
from zjax.moe.exchange import choose_exchange
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import make_plan

PARAMS = 2 * experts.HIDDEN * (experts.WIDTH + 1) + (experts.HIDDEN + 1) * experts.WIDTH
"""Elements of one expert."""


def make_run(degree, stage=0, router=experts.DROPLESS, *, make=runs.make_small_run):
    mesh = schema.Mesh(data=8 // degree, expert=degree)
    model = experts.make_model(router)
    return make(optax.sgd(0.5), stage, mesh=mesh, model=model)


def exchanged(degree, **changes):
    """Elements that a step sends over `expert`, by collective."""
    step = make_run(degree, make=runs.make_small_step, **changes)
    batch = jax.eval_shape(lambda: experts.make_batch(0))
    elements = collections.Counter()
    for each in list_collectives(step.compile(batch).as_text()):
        if mesh_axes(each.groups, step.mesh) == ("expert",):
            elements[each.op] += each.elements * each.times
    return dict(elements)


NORM = 4
"""Sums of squares of the four arrays of experts, which clipping adds up."""


@pytest.mark.parametrize("degree", [2, 4])
def test_all_gather_sends_tokens_and_returns_sums(degree):
    """Fails if the backward pass gathers tokens again."""
    tokens, top_k = experts.TOKENS // 8, experts.DROPLESS.top_k
    sent = 2 * experts.WIDTH + 2 * top_k  # tokens, cotangents; experts, weights
    returned = 2 * experts.WIDTH + top_k  # outputs, cotangents; those of weights
    assert exchanged(degree) == {
        "all-gather": degree * tokens * sent,
        "reduce-scatter": degree * tokens * returned,
        "all-reduce": NORM,
    }


def test_all_to_all_sends_rows_of_experts():
    """Fails if a row travels for a token that its expert dropped."""
    choice = choose_exchange(
        num_tokens=experts.TOKENS // 8,
        top_k=experts.CAPACITY.top_k,
        num_experts=experts.EXPERTS,
        num_shares=4,
        capacity=experts.CAPACITY.min_capacity,
    )
    values = 4 * experts.WIDTH + 2  # tokens, outputs, their cotangents; weights twice
    assert choice.exchange == "all-to-all"
    assert exchanged(4, router=experts.CAPACITY) == {
        "all-to-all": 4 * choice.sent * values,
        "all-reduce": NORM,
    }


@pytest.mark.parametrize(("degree", "stage"), [(2, 0), (8, 0), (4, 1), (4, 3)])
def test_a_device_holds_its_part_of_the_experts(degree, stage):
    """Fails if experts are stored, or used, on all devices."""
    run = make_run(degree, stage)
    names = [name for name, dims in experts.LOGICAL.items() if "experts" in dims]
    found = runs.held_bytes([run.state.master[name] for name in names])
    shares = 8 if stage else degree
    padded = 1.3 if stage else 1  # ZeRO pads what does not divide
    exact = 4 * experts.EXPERTS * PARAMS // shares
    assert exact <= found <= padded * exact


@pytest.mark.parametrize("degree", [3, 16])
def test_experts_that_do_not_divide_are_refused(degree):
    """Before anything compiles, whether they are too few or of another number."""
    config = runs.make_config(mesh=schema.Mesh(data=1, expert=degree))
    mesh = meshes.abstract_mesh(config.mesh, degree)
    with pytest.raises(PlanError) as error:
        make_plan(config, mesh, experts.make_model(), optax.sgd(0.5))
    assert str(error.value) == (
        f"down=(8, 4, 6) has a dim of 8 for {degree} devices with parts of their own; "
        f"use a multiple of {degree}, or another mesh.expert"
    )
