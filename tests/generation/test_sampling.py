"""Choice of tokens by rows of mixed settings, against loops and exact distributions."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.reference import filters as reference
from tests.support.lowering import cuda_program
from zjax.errors import ConfigError
from zjax.generation import logits as transforms
from zjax.generation.sampling import Sampling, choose_tokens, restrict, rows_of
from zjax_kernels import device

RNG = np.random.default_rng(0)
VOCAB, LENGTH = 23, 9
MIXED = (
    Sampling(),
    Sampling(temperature=0.7, seed=5),
    None,
    Sampling(temperature=1.3, top_k=4, seed=6),
    Sampling(temperature=1.0, top_p=0.6, seed=2**32 - 1),
    Sampling(temperature=2.0, min_p=0.2, repetition_penalty=1.4, seed=7),
    Sampling(frequency_penalty=0.8, presence_penalty=0.3, forbidden_ids=(3, 22)),
    Sampling(temperature=0.9, top_k=9, top_p=0.8, min_p=0.05, filtered_logprobs=True),
    Sampling(temperature=1.0, end_ids=(1, 2, 3, 4, 5), min_new_tokens=3),
)
LOGITS = (2 * RNG.normal(size=(len(MIXED), VOCAB))).astype(np.float32)
HISTORY = RNG.integers(0, VOCAB, size=(len(MIXED), LENGTH)).astype(np.int32)
PROMPTS = np.arange(len(MIXED), dtype=np.int32) % 4
LENGTHS = PROMPTS + np.array([0, 1, 2, 3, 4, 5, 5, 1, 2], np.int32)

choose = jax.jit(choose_tokens, static_argnames="num_best")


def choose_alike(sampling, num_rows, logits=LOGITS[0], **others):
    """Chooses for rows of one request that differ in seed and sample alone."""
    rows = rows_of([sampling] * num_rows)
    rows = rows._replace(**others)
    zeros = np.zeros(num_rows, np.int32)
    logits = np.broadcast_to(logits, (num_rows, len(logits)))
    return choose(logits, rows, zeros[:, None], zeros, zeros)


def select(numbers):
    """Arguments of `choose` for some rows of the mix."""
    rows = rows_of([MIXED[n] for n in numbers], end_ids=[0])
    rows = rows._replace(num_logprobs=np.full(len(rows.seed), 3, np.int32))
    numbers = np.array(numbers)
    arrays = (LOGITS, HISTORY, PROMPTS, LENGTHS)
    logits, *others = (x[numbers] for x in arrays)
    return logits, rows, *others


ALL = range(len(MIXED))


def test_a_row_is_chosen_alike_elsewhere():
    """Fails if a choice depends on the row's number, on neighbours or their number."""
    whole = choose(*select(ALL), num_best=3)
    assert len(set(whole.tokens.tolist())) > 4
    for numbers in ([*reversed(ALL)], [7, 7, 5], [8, 1], *([n] for n in ALL)):
        found = choose(*select(numbers), num_best=3)
        for field, wanted in zip(found[:4], whole[:4], strict=True):
            wanted = np.asarray(wanted)[numbers]
            np.testing.assert_allclose(field, wanted, rtol=1e-5, atol=1e-6)


def test_eager_and_compiled_choices_are_equal():
    arguments = jax.tree.map(jnp.asarray, select(ALL))
    eager, compiled = choose_tokens(*arguments), choose(*arguments)
    np.testing.assert_array_equal(eager.tokens, compiled.tokens)
    np.testing.assert_allclose(eager.logprobs, compiled.logprobs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", [("x", None), (None, "x")], ids=["rows", "vocab"])
def test_devices_choose_what_one_chooses(axes):
    """Fails if a filter or a draw depends on how logits are split."""
    num_devices, samplings = 4, [*MIXED[1:], *MIXED[3:]]
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("x",))
    num_rows, vocab = 12, 4_000
    logits = RNG.normal(size=(num_rows, vocab)).astype(np.float32)
    history = RNG.integers(0, vocab, (num_rows, 8)).astype(np.int32)
    prompts, lengths = np.full((2, num_rows), [[3], [7]], np.int32)
    rows = rows_of(samplings[:num_rows])
    rows = rows._replace(num_logprobs=np.zeros(num_rows, np.int32))
    wanted = choose(logits, rows, history, prompts, lengths)
    spread = jax.device_put(logits, NamedSharding(mesh, P(*axes)))
    found = choose(spread, rows, history, prompts, lengths)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_read_as_float32():
    logits, *others = select(ALL)
    halves = jnp.asarray(logits, jnp.bfloat16)
    found = choose(halves, *others, num_best=2)
    wanted = choose(halves.astype(jnp.float32), *others, num_best=2)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_draw_depends_on_seed_sample_and_position():
    """Fails if two of them are mixed up, or one is not read."""
    num_rows = 64
    flat = np.zeros(10_000, np.float32)
    draw = functools.partial(choose_alike, Sampling(temperature=1.0), num_rows, flat)
    numbers = np.arange(num_rows)
    by_seed = draw(seed=numbers.astype(np.uint32)).tokens
    by_sample = draw(sample=numbers.astype(np.int32)).tokens
    rows = rows_of([Sampling(temperature=1.0)] * num_rows)
    history = np.zeros((num_rows, 1), np.int32)
    logits = np.broadcast_to(flat, (num_rows, len(flat)))
    lengths = numbers.astype(np.int32)
    by_position = choose(logits, rows, history, np.zeros_like(lengths), lengths).tokens
    for tokens in (by_seed, by_sample, by_position):
        assert len(set(tokens.tolist())) > 60
        assert tokens[0] == by_seed[0]
    assert len({*by_seed.tolist(), *by_sample.tolist(), *by_position.tolist()}) > 180
    assert len(set(draw().tokens.tolist())) == 1


FILTERS = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.5, "top_k": 6},
    "top-p": {"temperature": 1.5, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.08},
    "all": {"temperature": 1.6, "top_k": 12, "top_p": 0.9, "min_p": 0.1},
}


@pytest.mark.parametrize("settings", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("source", ["seed", "sample"])
def test_frequencies_are_those_of_the_exact_distribution(settings, source):
    """Pearson's chi-square, up to the quantile that 1 in 10,000 right draws exceed."""
    num_rows, dtype = 20_000, np.uint32 if source == "seed" else np.int32
    numbers = {source: np.arange(num_rows, dtype=dtype)}
    tokens = choose_alike(Sampling(**settings), num_rows, **numbers).tokens
    observed = np.bincount(np.asarray(tokens), minlength=VOCAB)
    expected = num_rows * reference.distribution(LOGITS[0], **settings)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    chi_square = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = kept.sum() - 1
    # The quantile by the cubes of Wilson and Hilferty.
    part = 2 / (9 * degrees)
    assert chi_square < degrees * (1 - part + 3.72 * part**0.5) ** 3


def test_filters_apply_in_the_documented_order():
    """Fails if `top_p` reads the mass of tokens that `top_k` has removed."""
    logits = np.log(np.array([[0.3, 0.25, 0.2, 0.15, 0.1]], np.float32))
    sampling = Sampling(temperature=1.0, top_k=2, top_p=0.5)
    tokens = choose_alike(
        sampling, 200, logits[0], seed=np.arange(200, dtype=np.uint32)
    ).tokens
    assert set(tokens.tolist()) == {0}


def expected_row(number):
    """Logits of a row after penalties and forbidden ids, by loops."""
    sampling = MIXED[number] or Sampling()
    known = HISTORY[number, : LENGTHS[number]].tolist()
    prompt, written = known[: PROMPTS[number]], known[PROMPTS[number] :]
    row = reference.penalise(
        LOGITS[number],
        prompt,
        written,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
    )
    row[[*sampling.forbidden_ids]] = -np.inf
    if len(written) < sampling.min_new_tokens:
        row[[*(sampling.end_ids or ())]] = -np.inf
    return row


@pytest.mark.parametrize("number", ALL)
def test_penalties_and_forbidden_ids_equal_loops(number):
    """Fails if the prompt counts as text, or later columns are read."""
    logits = jax.jit(restrict)(*select([number]))[0]
    np.testing.assert_allclose(logits, expected_row(number), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", ALL)
def test_tokens_and_logprobs_equal_loops(number):
    sampling, row = MIXED[number] or Sampling(), expected_row(number)
    found = jax.tree.map(lambda x: x[0], choose(*select([number]), num_best=3))
    filtered = row
    if sampling.temperature:
        names = ("temperature", "top_k", "top_p", "min_p")
        settings = {name: getattr(sampling, name) for name in names}
        with np.errstate(divide="ignore"):
            filtered = np.log(reference.distribution(row, **settings))
    else:
        assert found.tokens == row.argmax()
    assert filtered[found.tokens] > -np.inf
    source = filtered if sampling.filtered_logprobs else LOGITS[number]
    with np.errstate(divide="ignore"):
        logprobs = np.log(reference.softmax(source))
    best = np.argsort(-logprobs, kind="stable")[:3]
    np.testing.assert_allclose(found.logprobs, logprobs[found.tokens], rtol=1e-4)
    np.testing.assert_array_equal(found.best_ids, best)
    np.testing.assert_allclose(found.best_logprobs, logprobs[best], rtol=1e-4)


def test_filtered_logprobs_are_of_what_is_drawn():
    sampling = Sampling(
        temperature=1.0, top_k=1, filtered_logprobs=True, num_logprobs=0
    )
    assert choose_alike(sampling, 1).logprobs.tolist() == [0.0]
    raw = dataclasses.replace(sampling, filtered_logprobs=False)
    assert choose_alike(raw, 1).logprobs[0] < -0.1


def test_log_probabilities_are_computed_where_a_row_asks():
    """Fails if a token depends on them, or sums are taken that nobody asks for."""
    logits, rows, *others = select(ALL)
    found = []
    for wanted in (-1, 0, 3):
        asked = np.full(len(rows.seed), -1, np.int32)
        asked[4] = wanted
        row = rows._replace(num_logprobs=asked)
        found.append(choose(logits, row, *others, num_best=3))
        np.testing.assert_array_equal(found[-1].tokens, found[0].tokens)
    nothing, some, all_of_it = found
    assert not any(np.any(x) for x in nothing[1:])
    assert np.all(some.logprobs < 0) and not np.any(some.best_ids)
    np.testing.assert_array_equal(some.logprobs, all_of_it.logprobs)
    assert np.all(np.diff(all_of_it.best_logprobs[4]) < 0)
    others_of_it = np.arange(len(logits)) != 4
    assert not np.any(all_of_it.best_logprobs[others_of_it])
    outside = [*always(jax.make_jaxpr(choose_tokens)(logits, rows, *others).jaxpr)]
    # One choice, of rows that ask for nothing but the most likely token.
    assert outside.count("cond") == 1 and not {"argmax", "exp", "log"} & {*outside}


@pytest.fixture
def on_hopper(monkeypatch):
    """A Hopper GPU that is said to be there; branches are traced again."""
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_no_branch_on_a_hopper_gpu_has_a_loop_or_a_sort(on_hopper):
    """Fails if the host would wait for the device: a CUDA graph holds neither."""
    arguments = jax.tree.map(jnp.asarray, select(ALL))
    program = cuda_program(functools.partial(choose_tokens, num_best=3), *arguments)
    operations = {*re.findall(r"(?:stablehlo|chlo)\.(\w+)", program)}
    assert "case" in operations and not {"while", "sort", "top_k"} & operations
    calls = re.findall(r"custom_call @(\w+)", program)
    # Two filters, and the best tokens behind each of the ways to choose one.
    assert sum(name.startswith("mosaic_gpu") for name in calls) == 4
    others = {name for name in calls if not name.startswith("mosaic_gpu")}
    assert others <= {"cu_threefry2x32_ffi"}


def always(jaxpr):
    """Names of the operations that no condition skips."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name in ("jit", "pjit"):
            yield from always(equation.params["jaxpr"].jaxpr)


@pytest.mark.parametrize("num_written", [0, 2, 3])
def test_end_ids_wait_for_the_least_number_of_tokens(num_written):
    """Ids of the tokenizer, of a request, and a request without any."""
    logits = np.tile(np.arange(5, dtype=np.float32), (3, 1))
    samplings = [
        Sampling(min_new_tokens=3),
        Sampling(min_new_tokens=3, end_ids=(4, 3)),
        Sampling(min_new_tokens=3, end_ids=()),
    ]
    rows = rows_of(samplings, end_ids=[4])
    prompts = np.full(3, 2, np.int32)
    history = np.zeros((3, 6), np.int32)
    found = choose(logits, rows, history, prompts, prompts + num_written)
    assert found.tokens.tolist() == ([3, 2, 4] if num_written < 3 else [4, 4, 4])


def count_calls(monkeypatch, samplings):
    """Names of the transformations that run."""
    run = []
    for name in (
        "count_tokens",
        "penalise_repetition",
        "penalise_counts",
        "forbid",
        "scale",
        "keep_top_k",
        "keep_top_p",
        "keep_min_p",
    ):
        original = getattr(transforms, name)

        def told(*args, name=name, original=original, **kwargs):
            jax.debug.callback(functools.partial(run.append, name))
            return original(*args, **kwargs)

        monkeypatch.setattr(transforms, name, told)
    logits, _, *others = select(range(len(samplings)))
    jax.jit(lambda *args: choose_tokens(*args))(logits, rows_of(samplings), *others)
    jax.effects_barrier()
    return set(run)


def test_greedy_rows_run_no_transformation(monkeypatch):
    """Filters that a greedy row does not read, beside a row that is free."""
    samplings = [Sampling(top_k=3, top_p=0.5, min_p=0.1), None, Sampling(seed=3)]
    assert count_calls(monkeypatch, samplings) == set()


def test_a_transformation_runs_if_a_row_asks(monkeypatch):
    """Fails if a filter runs for a greedy row."""
    asks = Sampling(presence_penalty=1.0, top_k=3, min_p=0.1)
    samplings = [asks, Sampling(temperature=1.0, top_p=0.5)]
    wanted = {"count_tokens", "penalise_counts", "scale", "keep_top_p"}
    assert count_calls(monkeypatch, samplings) == wanted


def test_settings_are_laid_into_rows():
    samplings = [Sampling(temperature=0.5, end_ids=(3,), seed=2**32 - 1), None]
    rows = rows_of(samplings, [4, 0], end_ids=[*range(9)])
    assert rows.temperature.tolist() == [0.5, 0.0]
    assert rows.seed.tolist() == [2**32 - 1, 0] and rows.seed.dtype == np.uint32
    assert rows.sample.tolist() == [4, 0]
    assert rows.end_ids.tolist() == [[3] + [-1] * 8, [*range(9)]]
    assert rows.forbidden_ids.shape == (2, 32)
    assert rows.top_p.dtype == np.float32 and rows.top_k.dtype == np.int32


GOOD = (
    Sampling(),
    Sampling(
        max_new_tokens=3,
        temperature=1e-5,
        top_k=11,
        top_p=1e-3,
        min_p=1.0,
        repetition_penalty=0.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        forbidden_ids=(0, 10),
        min_new_tokens=3,
        num_samples=4,
        seed=2**32 - 1,
        end_ids=(),
        stop=("a", "\n"),
        num_logprobs=11,
    ),
)


@pytest.mark.parametrize("sampling", GOOD)
def test_settings_within_their_ranges_have_no_problem(sampling):
    assert sampling.problems(11) == []


IDS = "use 0 to 10, or () for none"
PROBLEMS = {
    "max_new_tokens=-1 is negative; use 0 for all that the model can write": {
        "max_new_tokens": -1
    },
    "min_new_tokens=-1 is negative; use 0 for none": {"min_new_tokens": -1},
    "min_new_tokens=4 is above max_new_tokens=3; use at most 3": {
        "min_new_tokens": 4,
        "max_new_tokens": 3,
    },
    "num_samples=0 is below 1; use 1": {"num_samples": 0},
    "num_samples=2 would be equal texts at temperature=0.0; use 1, or a temperature "
    "above 0": {"num_samples": 2},
    "seed=-1 is no unsigned 32-bit number; use 0 to 4294967295": {"seed": -1},
    "temperature=-1.0 is neither 0 nor 1e-05 or more; use 0 for the most likely token, "
    "or 1 for the model's distribution": {"temperature": -1.0},
    "temperature=inf is not finite; use 0 for the most likely token, or 1 for the "
    "model's distribution": {"temperature": np.inf},
    "top_k=12 is not between 0 and model.vocab_size=11; use 0 for all": {"top_k": 12},
    "top_p=0.0 is not above 0 and up to 1; use 1 for all": {"top_p": 0.0},
    "min_p=1.5 is not between 0 and 1; use 0 for all": {"min_p": 1.5},
    "repetition_penalty=0.0 is not between 1e-20 and 1e+20; use 1 for none": {
        "repetition_penalty": 0.0
    },
    "repetition_penalty=1e-46 is not between 1e-20 and 1e+20; use 1 for none": {
        "repetition_penalty": 1e-46
    },
    "presence_penalty=nan is not between -1e+20 and 1e+20; use 0 for none": {
        "presence_penalty": np.nan
    },
    "presence_penalty=1e+39 is not between -1e+20 and 1e+20; use 0 for none": {
        "presence_penalty": 1e39
    },
    "frequency_penalty=inf is not between -1e+20 and 1e+20; use 0 for none": {
        "frequency_penalty": np.inf
    },
    f"forbidden_ids=(11,) has 11, which is no id of 11; {IDS}": {
        "forbidden_ids": (11,)
    },
    f"end_ids=(-1,) has -1, which is no id of 11; {IDS}": {"end_ids": (-1,)},
    "end_ids=(0, 1, 2, 3, 4, 5, 6, 7, 8) has 9 ids; give at most 8": {
        "end_ids": tuple(range(9))
    },
    "forbidden_ids=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9) leaves no token to choose; forbid "
    "fewer": {
        "forbidden_ids": tuple(range(10)),
        "end_ids": (10,),
        "min_new_tokens": 1,
    },
    "stop=('',) is no tuple of texts with a character or more; use () for none": {
        "stop": ("",)
    },
    "num_logprobs=12 is not between 0 and 11; use None for no log-probabilities": {
        "num_logprobs": 12
    },
}


OTHER_TYPES = {
    "max_new_tokens=2.5 is no integer; use one, such as 1": {"max_new_tokens": 2.5},
    "num_logprobs='2' is no integer; use one, such as 1": {"num_logprobs": "2"},
    "temperature='1' is no number; use one, such as 1.0\n"
    "top_p=None is no number; use one, such as 1.0": {
        "temperature": "1",
        "top_p": None,
    },
    "forbidden_ids=(1.5,) are no ids; use integers, or () for none": {
        "forbidden_ids": (1.5,)
    },
    "end_ids=5 are no ids; use integers, or () for none": {"end_ids": 5},
    "stop='ab' is no tuple of texts with a character or more; use () for none": {
        "stop": "ab"
    },
    "stop=(5,) is no tuple of texts with a character or more; use () for none": {
        "stop": (5,)
    },
}


@pytest.mark.parametrize("text", OTHER_TYPES)
def test_a_setting_of_another_type_is_refused_before_a_thread_fails(text, untyped):
    """Fails if a request like this ends the texts of all requests."""
    with pytest.raises(ConfigError) as error:
        Sampling(**OTHER_TYPES[text])
    assert str(error.value) == text


def test_settings_may_be_scalars_and_lists_of_numpy(untyped):
    settings = {"max_new_tokens": np.int64(3), "temperature": np.float32(1)}
    ids = {"end_ids": [3], "forbidden_ids": (np.int32(4),), "stop": ["a"]}
    assert Sampling(**settings, **ids).problems(11) == []


@pytest.mark.parametrize("text", PROBLEMS)
def test_a_setting_out_of_range_is_a_problem(text, untyped):
    assert [*map(str, Sampling(**PROBLEMS[text]).problems(11))] == [text]


def test_more_forbidden_ids_than_a_row_holds_are_a_problem():
    found = Sampling(forbidden_ids=(0,) * 33).problems(11)
    assert [(each.field, each.problem) for each in found] == [
        ("forbidden_ids", "has 33 ids")
    ]


def test_all_problems_are_found_at_once():
    sampling = Sampling(temperature=-1.0, top_k=-1, end_ids=(50,), num_logprobs=99)
    fields = [each.field for each in sampling.problems(11)]
    assert fields == ["temperature", "top_k", "end_ids", "num_logprobs"]
