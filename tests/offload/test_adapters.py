"""Adapters whose state is on the host: frozen weights have none, and stream as such."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support import huggingface as golden
from tests.support.language import likely_texts
from tests.support.offload import (
    GPT,
    LLAMA,
    make_batch,
    make_config,
    memories,
    on_device,
    start,
    train,
)
from tests.support.trees import stacked
from zjax.config.load import load_config
from zjax.errors import PlanError
from zjax.huggingface import adapter_settings
from zjax.run.saving import restore, save
from zjax.settings import schema
from zjax.sharding import memory

ADAPTERS = schema.Lora(rank=4, alpha=8.0)
ON_HOST = {"parameter_memory": "pinned_host"}
QUICK = {"peak_learning_rate": 0.01}


def config_of(where="pinned_host", lora=ADAPTERS, **settings):
    settings = {"optimizer": QUICK} | settings
    return make_config(where, lora=lora, **settings)


def weights_of(run, state):
    """Weights for evaluation in logical shapes, stacked."""
    params = jax.tree.map(np.asarray, run.step.parameters(state))
    return stacked(params)


def by_kind(run, tree):
    """Arrays of adapters and others."""
    rows = jax.tree.leaves(run.plan.master)
    pairs = list(zip(rows, jax.tree.leaves(tree), strict=True))
    return [[x for row, x in pairs if row.is_frozen is kind] for kind in (False, True)]


@pytest.mark.parametrize("parameter_memory", ["device", "pinned_host"])
def test_frozen_weights_have_one_copy_and_adapters_their_state_on_the_host(
    parameter_memory,
):
    """Fails if a frozen weight has a master, a moment, a gradient or a second copy."""
    run = start(
        config_of(
            zero={"parameter_memory": parameter_memory},
            precision={"compute_dtype": "bfloat16"},
            stage=0,
            model=LLAMA,
        )
    )
    state, _ = train(run, 2)
    adapters, frozen = by_kind(run, state.master)
    assert {x.sharding.memory_kind for x in adapters} == {"pinned_host"}
    assert {x.dtype.name for x in adapters} == {"int16"}
    assert {x.dtype.name for x in frozen} == {"bfloat16"}
    assert memories(frozen) == {"device", parameter_memory}
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    assert len(jax.tree.leaves(state.params)) == len(adapters)
    assert len(jax.tree.leaves(run.plan.grads)) == len(adapters)
    size = sum(x.size for x in adapters)
    assert sum(x.nbytes for x in moments) == 8 * size
    stored = memory.stored_bytes(run.plan)
    total = sum(2 * x.size for x in frozen)
    on_host = 10 * size
    if parameter_memory == "pinned_host":
        blocks = [x for x in frozen if x.sharding.memory_kind == "pinned_host"]
        on_host += sum(x.nbytes for x in blocks) + 2 * size
    assert abs(stored.host - on_host) < 1024
    assert abs(stored.host + stored.device - total - 12 * size) < 1024


def test_blocks_save_no_frozen_weights():
    """Fails if what a policy saves of a block holds weights beside activations."""
    model = dataclasses.replace(GPT, remat="attention")
    adapters = dataclasses.replace(ADAPTERS, rank=1, targets=("/query",))
    saved = []
    for lora in (adapters, None):
        run = start(config_of(lora=lora, model=model, stage=0))
        train(run, 1)
        saved.append(run.step.executor.step.backward.residual_bytes)
    assert 0 < saved[0] <= saved[1] * 1.1


@pytest.mark.parametrize("name", ["new", "rslora"])
def test_adapters_beside_a_checkpoint_are_those_of_the_device(name):
    """Fails if a layer gets the adapter of another one, or lengths of no column."""
    lora = {"rank": 2, "form": "dora"}
    if name != "new":
        lora = adapter_settings(golden.FOLDER.parent / "peft" / name)
    settings, states = {f"lora.{n}": x for n, x in lora.items()}, []
    for where in ("none", "pinned_host"):
        config = golden.make_config("llama", f"zero.offload={where}")
        run = golden.start(load_config(config, settings))
        states.append(weights_of(run, run.state))
    jax.tree.map(np.testing.assert_array_equal, *states)
    first, second = states[0]["blocks"]["attention"]["query"]["lora"]["a"]
    assert np.abs(first - second).max() > 0


@pytest.mark.usefixtures("greedy")
def test_checkpoints_and_texts_are_those_of_the_device(tmp_path):
    """Fails if frozen weights are lost on the way to a checkpoint or a pass."""
    config = config_of(zero=ON_HOST)
    run, other = start(config), start(on_device(config))
    state, _ = train(run, 2)
    batch = make_batch(9)
    wanted = float(run.evaluate(state, batch)["loss"])
    save(tmp_path / "host", state, run)
    back, _ = restore(tmp_path / "host", run)
    np.testing.assert_allclose(run.evaluate(back, batch)["loss"], wanted, rtol=1e-6)
    there, _ = restore(tmp_path / "host", other)
    np.testing.assert_allclose(other.evaluate(there, batch)["loss"], wanted, rtol=1e-5)
    tokens = np.asarray(batch["tokens"][:8, :4])
    texts = run.generate(back, tokens, max_new_tokens=4, temperature=0.0)
    asked = [(row.tolist(), 4) for row in tokens]
    wanted_texts = likely_texts(other.bind(there), asked, length=8)
    assert texts[:, 4:].tolist() == wanted_texts
    save(tmp_path / "device", there, other)
    again, _ = restore(tmp_path / "device", run)
    np.testing.assert_allclose(run.evaluate(again, batch)["loss"], wanted, rtol=1e-5)


def test_tiles_that_are_frozen_unlike_others_are_refused():
    """Fails if the program of one tile differentiates another as its own."""
    groups = (schema.ParamGroup(pattern="tiles/0/up", learning_rate_scale=0.0),)
    model = dataclasses.replace(GPT, mlp_tiles=2)
    config = make_config("pinned_host", model=model, optimizer={"groups": groups})
    with pytest.raises(PlanError) as caught:
        start(config)
    assert str(caught.value) == (
        "model.mlp_tiles='blocks/mlp/tiles/1/up/bias' is frozen, or not, unlike the "
        "same array of another tile; freeze it in all tiles or in none, or keep state "
        "on the devices"
    )


def test_a_frozen_bias_of_routers_stays_where_it_is():
    """Fails if what totals move is looked for among what is trained alone."""
    moe = schema.TokenChoice(num_experts=4, top_k=2, expert_size=8, choice_bias=True)
    groups = (schema.ParamGroup(pattern="router", learning_rate_scale=0.0),)
    run = start(
        make_config(
            "pinned_host",
            model=dataclasses.replace(LLAMA, moe=moe),
            optimizer=QUICK | {"groups": groups},
        )
    )
    before = weights_of(run, run.state)["blocks"]["mlp"]["router"]["bias"]
    state, _ = run.step(run.state, make_batch(0))
    router = weights_of(run, state)["blocks"]["mlp"]["router"]
    np.testing.assert_array_equal(router["bias"], before)
