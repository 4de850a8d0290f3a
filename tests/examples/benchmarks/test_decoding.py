"""The programs of `examples/benchmarks` that measure how fast models decode."""

import ast

import pytest

from tests.support.benchmarks import FOLDER, load


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
    found = workload.describe([3.0])["continuous tokens/s"]
    assert found == {"median": 5, "min": 5, "max": 5, "n": 1}


def test_cases_need_neither_torch_nor_jax():
    """Fails if a peer would load JAX, or zjax torch."""
    for name in ("decode_cases", "call_timing", "timing", "llama", "mixtures", "shape"):
        tree = ast.parse((FOLDER / f"{name}.py").read_text())
        nodes = [
            x for x in ast.walk(tree) if isinstance(x, ast.Import | ast.ImportFrom)
        ]
        words = {word for x in nodes for word in ast.unparse(x).split()}
        assert not words & {"torch", "jax", "jax.numpy", "zjax"}
