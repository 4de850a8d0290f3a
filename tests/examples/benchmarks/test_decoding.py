"""The programs of `examples/benchmarks` that measure how fast models decode."""

import ast
import dataclasses
import functools
import json
import math
import sys

import jax
import pytest
from contests.contest import load_contest

from tests.support.benchmarks import FOLDER, load
from zjax.models import flops

pytestmark = pytest.mark.usefixtures("greedy")


@pytest.mark.parametrize(
    ("name", "num_params", "token_bytes"),
    # Parameters as the authors count them; keys and values of all layers.
    [
        ("7b", 6_738_415_616, 2 * 2 * 32 * 4096),
        ("8b", 8_030_261_248, 2 * 2 * 32 * 1024),
    ],
)
@pytest.mark.parametrize("batch", [1, 64])
def test_a_token_reads_all_weights_but_the_token_table(
    name, num_params, token_bytes, batch
):
    cases = load("decode_cases")
    case = cases.Case(cases.SHAPES[name], batch)
    table = case.shape.vocab_size * 4096
    assert case.weight_bytes == 2 * (num_params - table + batch * 4096)
    assert case.cache_bytes == batch * 1024 * token_bytes
    assert case.num_bytes == case.weight_bytes + case.cache_bytes


def test_the_smallest_shape_has_about_as_many_parameters_as_gpt_2():
    shape = load("decode_cases").SHAPES["1p5b"]
    assert shape.num_params == pytest.approx(1.6e9, rel=0.05)
    assert shape.embed_size == 64 * shape.num_heads


def test_a_sweep_has_the_context_in_its_middle():
    cases = load("decode_cases")
    given = cases.make_parser().parse_args(["--batches=1,16", "--context=100"])
    one, several = cases.make_cases(given)
    assert (one.batch, several.batch) == (1, 16)
    assert (one.num_given, one.length) == (68, 132)
    assert one.shape.length >= one.length
    prompts = several.prompts()
    assert {len(prompt) for prompt in prompts} == {68}
    assert len({prompt[0] for prompt in prompts}) > 1
    assert prompts == several.prompts()


def test_times_become_rates():
    cases = load("decode_cases")
    case = cases.Case(cases.SHAPES["tiny"], 4)
    found = case.describe([0.5, 0.25, 0.2])
    assert found["batch 4 ms_per_token"]["median"] == 250
    assert found["batch 4 tokens/s"] == {"median": 16, "min": 8, "max": 20, "n": 3}
    assert found["batch 4 bytes/s"]["max"] == pytest.approx(5 * case.num_bytes)
    workload = cases.Workload(num_requests=3, num_given=2, num_new=5)
    assert [len(prompt) for prompt in workload.prompts(11)] == [2, 2, 2]
    found = workload.describe([3.0])["5 new tokens/s"]
    assert found == {"median": 5, "min": 5, "max": 5, "n": 1}


def test_requests_spread_evenly_by_the_logarithm_of_their_size():
    cases = load("decode_cases")
    flags = "--num_requests=400", "--min_new=4", "--num_new=64,16"
    parser = cases.make_parser()
    cases.add_workload(parser)
    short, workload = cases.make_workloads(parser.parse_args(flags))
    assert (short.num_new, workload.num_new) == (16, 64)
    sizes = workload.sizes()
    assert (min(sizes), max(sizes)) == (4, 64)
    assert sorted(sizes) != sizes == workload.sizes()
    for middle in (8, 16, 32):
        share = sum(size < middle for size in sizes) / len(sizes)
        assert share == pytest.approx(math.log(middle / 4, 16), abs=0.05)
    # By hand: the mean of a density 1 / x between 4 and 64.
    assert sum(sizes) / 400 == pytest.approx(60 / math.log(16), rel=0.01)
    found = workload.describe([2.0])["4 to 64 new tokens/s"]
    assert found["median"] == sum(sizes) / 2


def test_a_mixture_reads_the_experts_that_are_chosen():
    """By hand: Qwen3-30B-A3B without the token table, all experts."""
    cases = load("decode_cases")
    case = cases.Case(cases.SHAPES["moe_30b"], 16, num_experts=128)
    assert case.shape.num_params == pytest.approx(30.5e9, rel=0.01)
    vectors = 48 * 2 * 128  # norms of heads are not counted
    table = (case.shape.vocab_size - 16) * 2048
    assert case.weight_bytes == 2 * (case.shape.num_params - table - vectors)
    few = dataclasses.replace(case, num_experts=8)
    assert few.weight_bytes == case.weight_bytes - 2 * 48 * 120 * 3 * 2048 * 768
    assert case.cache_bytes == 16 * 1024 * 48 * 2 * 2 * 4 * 128


def test_cases_need_neither_torch_nor_jax():
    """Fails if a peer would load JAX, or zjax torch."""
    names = "decode_cases", "call_timing", "timing", "llama", "mixtures", "shape"
    for name in (*names, "serve_clients"):
        tree = ast.parse((FOLDER / f"{name}.py").read_text())
        nodes = [
            x for x in ast.walk(tree) if isinstance(x, ast.Import | ast.ImportFrom)
        ]
        words = {word for x in nodes for word in ast.unparse(x).split()}
        assert not words & {"torch", "jax", "jax.numpy", "zjax"}


@pytest.fixture
def ours(monkeypatch, capsys):
    """Runs our program on a model of one layer; returns what it prints."""
    module = load("decode_ours")
    tiny = dataclasses.replace(module.cases.SHAPES["tiny"], num_layers=1)
    monkeypatch.setitem(module.cases.SHAPES, "tiny", tiny)

    def run(*flags):
        short = "--shape=tiny", "--num_sweeps=2", "--copy_floats=1024"
        monkeypatch.setattr(sys, "argv", ["decode_ours.py", *short, *flags])
        module.main()
        return json.loads(capsys.readouterr().out.removeprefix("RESULT "))

    return run


def test_a_small_model_decodes(ours):
    found = ours("--batches=2", "--context=40", "--num_tokens=8", "--profile")
    row, _, small, *_ = load_contest(FOLDER / "decode.py").rows
    assert small.cases[0].metric.removeprefix("batch 1") == " ms_per_token"
    metrics = {case.metric for case in row.cases}
    names = {metric.replace("batch 1 ", "batch 2 ") for metric in metrics}
    names = {name for name in names if name.startswith("batch 2 ")}
    assert names == {"batch 2 bytes/s", "batch 2 tokens/s"}
    for name in (*names, "batch 2 share", "batch 2 ms_per_token"):
        assert found[name]["n"] == 2
        assert 0 < found[name]["min"] <= found[name]["median"]
    assert found["copy_bytes_per_second"]["min"] > 0
    assert found["batch 2 first_seconds"] > 0


def test_a_small_model_serves_requests(ours):
    found = ours("--continuous", "--num_requests=3", "--num_new=4,6")
    assert {found[f"{size} new tokens/s"]["n"] for size in (4, 6)} == {2}


def test_experts_are_counted_by_the_choices_of_the_rows():
    """Fails if prompts count, or the count is not that of the routers."""
    module = load("decode_ours")
    shape = dataclasses.replace(module.cases.SHAPES["tiny_moe"], length=300)
    one, several = (
        module.cases.Case(shape, batch, context=80, num_tokens=8) for batch in (1, 3)
    )
    decoder = module.RandomDecoder(shape)
    assert module.count_experts(decoder, one) == shape.top_k == 2
    # Three rows choose two of eight each: by chance 8 (1 - (3 / 4)^3) experts in all.
    assert 2 < module.count_experts(decoder, several) < 6
    with module.counted_experts(1) as numbers:
        module.sweep(module.make_static_engine(decoder, 1, shape.length), one)
        jax.effects_barrier()
    assert set(numbers) == {2}
    assert len(numbers) >= shape.num_layers * (module.WARM_UP_TOKENS + 8)


def test_no_request_joins_a_batch():
    """Fails if the classical way is ours, or takes passes of its own."""
    module = load("decode_ours")
    shape = dataclasses.replace(module.cases.SHAPES["tiny"], num_layers=1)
    engine = module.make_static_engine(module.RandomDecoder(shape), 2, 64)
    workload = module.cases.Workload(6, num_new=48, min_new=3, num_given=4)
    step, mixed = engine.step, []

    def noting():
        batches = {row.arrival // 2 for row in engine.scheduler.shards[0].running}
        mixed.append(len(batches) > 1)
        return step()

    engine.step = noting
    for in_batches in (True, False):
        mixed.clear()
        engine.scheduler._num_arrived = 0
        assert module.serve(engine, workload, shape.vocab_size, in_batches) > 0
        assert any(mixed) != in_batches


@pytest.mark.parametrize("name", ["7b", "8b", "1p5b", "moe_30b"])
def test_our_model_has_the_parameters_of_its_peers(name):
    """Fails if the programs decode different models."""
    module = load("decode_ours")
    shape = module.cases.SHAPES[name]
    assert flops.num_params(module.model_settings(shape)) == shape.num_params


def test_weights_are_made_in_bfloat16():
    module = load("decode_ours")
    weights = module.RandomDecoder(module.cases.SHAPES["tiny"]).weights
    assert len(weights.blocks) == 2
    leaves = jax.tree.leaves(weights)
    assert {leaf.dtype.name for leaf in leaves} == {"bfloat16"}
    assert sum(x.size for x in leaves) == module.cases.SHAPES["tiny"].num_params
    assert all(float(abs(leaf).max()) > 0 for leaf in leaves)


def test_rows_are_timed_around_the_context():
    """Fails if a sweep begins before all rows have tokens, or goes on for longer."""
    module = load("decode_ours")
    shape = dataclasses.replace(module.cases.SHAPES["tiny"], num_layers=1, length=400)
    # More prompts than a pass reads.
    case = module.cases.Case(shape, 12, context=200, num_tokens=32)
    decoder = module.RandomDecoder(shape)
    engine = module.make_static_engine(decoder, case.batch, shape.length)
    rows, seen = [], []

    class Noting:
        def __enter__(self):
            rows.extend(engine.scheduler.shards[0].running)
            self.note()

        def __exit__(self, *_):
            self.note()

        def note(self):
            seen.append([len(row.tokens) for row in rows])

    module.sweep(engine, case, Noting())
    first, last = seen
    assert len(first) == 12
    assert min(first) >= case.num_given
    assert {b - a for a, b in zip(first, last, strict=True)} == {32}
    assert sum(first + last) / 24 == pytest.approx(case.context, abs=12)
    assert {row.finish_reason for row in rows} == {"abort"}
    assert engine.scheduler.shards[0].running == []


def test_weights_of_all_kinds_are_timed(monkeypatch):
    """Fails if a kind is not what the claim compares, or is not stored as codes."""
    module = load("narrow_decode_ours")
    monkeypatch.setattr(module, "BATCHES", (1, 3))
    monkeypatch.setattr(module.call_timing, "ROUND_SECONDS", 0)
    shape = dataclasses.replace(load("decode_cases").SHAPES["tiny"], num_layers=1)
    stored, real = [], module.RandomDecoder

    def make(*given):
        decoder = real(*given)
        leaves = jax.tree.leaves(decoder.weights.blocks)
        stored.append({leaf.dtype.name for leaf in leaves} - {"bfloat16"})
        return decoder

    monkeypatch.setattr(module, "RandomDecoder", make)
    metrics = module.measure(shape, [*module.KINDS])
    assert stored == [set(), {"int8"}, {"int4"}, {"float8_e4m3fn"}]
    assert {metrics[x]["n"] for x in metrics} == {module.call_timing.ROUNDS}
    row = load_contest(FOLDER / "narrow_decode.py").rows[0]
    assert len(row.cases) == 9
    compared = [x for x in row.cases if x.name.endswith(" b=1")]
    assert {x.metric for x in compared} | {x.peer_metric for x in compared} == {
        name for name in metrics if " b=1 " in name
    }


def test_attention_of_each_side_becomes_rates(monkeypatch, capsys):
    module = load("decode_attention")
    for name, value in (("ROUND_SECONDS", 0), ("LAYERS_BYTES", 0)):
        monkeypatch.setattr(module, name, value)
    reference = functools.partial(module.ours, implementation="reference")

    def fails(*_):
        raise RuntimeError("not on this device")

    ways = {"ours": (reference, True), "cuDNN": (fails, False)}
    metrics = module.compare(ways, [(2, 128)], copy=1e9)
    assert [*metrics] == ["2 x 128 bytes/s"]
    assert metrics["2 x 128 bytes/s"]["n"] == module.ROUNDS
    shown = capsys.readouterr().out
    assert "cuDNN does not run: not on this device" in shown
    row = load_contest(FOLDER / "decode.py").rows[-1]
    assert len(row.cases) == len(module.BATCHES) * len(module.LENGTHS) + 1
    assert all(module.cache_bytes(*x) < module.MAX_BYTES for x in module.QUICK)


TRACE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #7(Compute)"
    events { metadata_id: 1 duration_ps: 3000000 }
    events { metadata_id: 2 duration_ps: 9000000 }
    events { metadata_id: 1 duration_ps: 1000000 }
  }
  lines { name: "XLA Modules" events { metadata_id: 3 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "gemm" } }
  event_metadata { key: 2 value { id: 2 name: "attend" } }
  event_metadata { key: 3 value { id: 3 name: "jit_run" } }
}
planes {
  name: "/host:CPU"
  lines { name: "Stream" events { metadata_id: 1 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "python" } }
}
"""


def test_kernels_are_listed_by_the_time_they_take(capsys):
    module = load("kernel_times")
    data = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(TRACE)
    )
    times = module.kernel_times(data)
    assert list(times) == ["attend", "gemm"]
    assert times["gemm"] == (pytest.approx(4e-6), 2)
    module.show(times, 2, "token")
    shown = capsys.readouterr().err
    assert "all kernels: 6.5 us/token" in shown
    assert "69.2%" in shown
