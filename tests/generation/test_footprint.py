"""The bytes of a plan of generation are those that a generator allocates."""

import gc
import importlib

import jax
import pytest

from tests.support import small_run
from tests.support.allocated import bytes_here, weights_and_caches
from zjax.errors import ConfigError
from zjax.generation.dtypes import Dtypes
from zjax.generation.footprint import footprint_of
from zjax.generation.generator import Generator
from zjax.generation.sizes import PAGE_SIZE, fit_pages
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.build import start_run
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import make_plan

making = importlib.import_module("zjax.generation.generator")
PLAIN = "model.dropout_rate=0"
OFFLOADED = (
    "model.embed_size=512",
    "model.tied_head=False",
    "zero.stage=1",
    "zero.offload=pinned_host",
    "zero.offload.parameter_memory=pinned_host",
)


def make(*settings):
    config = small_run.make_config("never/written", PLAIN, *settings)
    run = start_run(config, make_model(config), None)
    return run, footprint_of(config, run.plan, run.model)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("zero.stage=3", "model.tied_head=False", "mesh.tensor=2"),
        ("model.num_layers=2", "model.vocab_size=64", "mesh.pipeline=2"),
        ("model.moe.num_experts=4", "mesh.expert=4", "mesh.sequence=2"),
    ],
    ids=["tied", "tensor", "pipeline", "experts"],
)
def test_weights_and_pages_take_what_is_planned(settings):
    """Fails if a plan misses a copy of a table, or a split that the engine makes."""
    run, footprint = make(*settings)
    with Generator(run, run.state, max_rows=1, num_pages=5) as generator:
        weights, caches = weights_and_caches(generator)
    assert footprint.resident_bytes == weights
    assert footprint.token_bytes * 5 * PAGE_SIZE == caches
    assert footprint.streamed_bytes == 0


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_codes_and_narrow_keys_take_what_is_planned(weight_dtype):
    """Fails if a plan counts matrices that are codes, or scales are forgotten."""
    run, plain = make("model.embed_size=64")
    dtypes = Dtypes(weight_dtype, "float8")
    footprint = footprint_of(run.config, run.plan, run.model, dtypes)
    given = {"weight_dtype": weight_dtype, "cache_dtype": "float8"}
    with Generator(run, run.state, max_rows=1, num_pages=5, **given) as generator:
        weights, caches = weights_and_caches(generator)
    if weight_dtype == "int8":  # a CPU stores an int4 in a byte
        assert footprint.resident_bytes == weights
    assert footprint.resident_bytes <= weights
    assert footprint.token_bytes * 5 * PAGE_SIZE == caches
    assert footprint.token_bytes == plain.token_bytes / 4
    block = footprint.start_bytes - plain.resident_bytes
    assert 0 < block < footprint.resident_bytes  # of one layer


def test_blocks_off_the_devices_are_no_part_of_what_stays():
    run, footprint = make(*OFFLOADED)
    with jax.set_mesh(run.mesh):
        decoder = run.decoder(run.state)
    stored = jax.tree.leaves(decoder.stored)
    kinds = {x.sharding.memory_kind for x in stored}
    assert "pinned_host" in kinds
    stay = bytes_here((decoder.embed, decoder.head, decoder.stored))
    assert footprint.resident_bytes - footprint.staged_bytes == stay
    moved = [x for x in stored if x.sharding.memory_kind == "pinned_host"]
    shards = [x.addressable_shards[0].data.nbytes for x in moved]
    assert footprint.streamed_bytes == sum(shards) > 0
    # A block of this pass and of the next one.
    assert footprint.staged_bytes == 2 * footprint.streamed_bytes
    link = footprint.streamed_bytes / 4e10
    assert footprint.step_seconds(1, 16, bandwidth=1e20) == link
    assert footprint.step_seconds(1, 16, bandwidth=1.0) > link


def test_pages_fill_what_one_copy_of_the_weights_leaves(monkeypatch):
    """Fails if the decoder is still there, or a shared table twice, as pages are
    counted.
    """
    run, footprint = make()
    seen = []

    def count(*given):
        seen.append(bytes_here(jax.live_arrays()))
        return 5

    monkeypatch.setattr(making, "count_pages", count)
    gc.collect()
    before = bytes_here(jax.live_arrays())
    with Generator(run, run.state, max_rows=1):
        pass
    assert seen == [before + footprint.resident_bytes]


def planned(num_devices=1, **model):
    """Footprint of a model on an abstract mesh."""
    shape = {"num_layers": 2, "embed_size": 16, "num_heads": 2, "num_kv_heads": 1}
    shape |= {"mlp_size": 32, "vocab_size": 61, "max_length": 128, "use_bias": False}
    shape |= {"norm": "rms_norm", "tied_head": False, "positions": "rotary"} | model
    config = small_run.load_config({"model": shape})
    model = make_model(config)
    mesh = meshes.abstract_mesh(config.mesh, num_devices)
    plan = make_plan(config, mesh, model, make_optimizer(config, model))
    return footprint_of(config, plan, model)


def test_a_step_reads_weights_once_and_a_row_of_the_table_for_each_token():
    """By hand, in bfloat16: layers of width 16 and 32 with one head of keys of 8."""
    footprint = planned()
    layer = 16 * (16 + 8 + 8) + 16 * 16 + 2 * 16 * 32 + 2 * 16
    read = 2 * layer + 61 * 16 + 16
    assert footprint.resident_bytes == 2 * (read + 61 * 16)
    assert footprint.weight_bytes(3) == 2 * (read + 3 * 16)
    token = 2 * 2 * (8 + 8)
    assert footprint.token_bytes == token
    assert footprint.cache_bytes(3, 100) == 3 * 100 * token
    num_bytes = 2 * (read + 3 * 16) + 3 * 100 * token
    assert footprint.step_seconds(3, 100, 1e9) == num_bytes / 1e9
    assert (footprint.row_pages(64), footprint.row_pages(65)) == (1, 2)


def test_layers_with_a_window_read_the_window():
    window = {"size": 32, "full_attention_every": 2}
    footprint = planned(window=window)
    assert footprint.cache_bytes(2, 100) == 2 * (32 + 100) * 2 * (8 + 8)
    assert footprint.cache_bytes(2, 20) == 2 * (20 + 20) * 2 * (8 + 8)


def test_rows_hold_the_window_and_a_pass_where_all_layers_have_one():
    """Fails if a plan counts pages that a generator frees, or none of a full layer."""
    shape = {"max_length": 4096, "window": {"size": 130}}
    footprint = planned(**shape)
    assert (footprint.row_pages(128), footprint.row_pages(4096)) == (2, 11)
    page = 64 * footprint.token_bytes
    device = footprint.resident_bytes + 34.1 / 0.9 * page
    assert footprint.fit_tokens(device) == 33 * 64
    assert footprint.fit_rows(device, max_rows=64, length=4096) == 3
    shape["window"] |= {"full_attention_every": 2}
    assert planned(**shape).row_pages(4096) == 64


def test_a_step_reads_the_experts_that_tokens_choose():
    """Fails if one token reads all experts, or many tokens read some twice."""
    few = planned(moe={"num_experts": 8, "top_k": 2})
    experts = few.expert_bytes
    assert experts == 2 * 8 * 2 * (2 * 16 * 32)
    assert few.num_experts == 8
    assert few.touched_experts(1) == 1 / 4
    assert few.touched_experts(2) == pytest.approx(1 - (3 / 4) ** 2)
    assert few.touched_experts(64) == pytest.approx(1, abs=1e-7)
    rest = few.weight_bytes(1) - experts / 4
    assert few.weight_bytes(64) - 63 * 2 * 16 == pytest.approx(rest + experts)
    assert planned().touched_experts(1) == 0


def test_rows_fit_in_whole_pages_beside_the_weights():
    """Fails if the sink, or the weights, are forgotten."""
    footprint = planned()
    page = 64 * footprint.token_bytes
    free = 11.1 / 0.9 * page
    assert fit_pages(free, int(page)) == 11
    device = footprint.resident_bytes + free
    assert footprint.fit_tokens(device) == 10 * 64
    assert footprint.fit_rows(device, max_rows=64, length=65) == 5
    assert footprint.fit_rows(device, max_rows=3, length=65) == 3
    assert footprint.fit_rows(footprint.resident_bytes - 1, 64, 64) == 0
    assert footprint.fit_rows(float("inf"), max_rows=64, length=65) == 64


def test_models_that_write_no_text_are_refused():
    with pytest.raises(ConfigError, match=r"model\.moe='expert_choice' chooses tokens"):
        planned(moe=schema.ExpertChoice(num_experts=4))
    config = small_run.make_config("never/written", "model.kind=encoder")
    model = make_model(config)
    mesh = meshes.abstract_mesh(config.mesh, 1)
    plan = make_plan(config, mesh, model, make_optimizer(config, model))
    with pytest.raises(ConfigError, match=r"model\.kind='encoder' writes no text"):
        footprint_of(config, plan, model)
