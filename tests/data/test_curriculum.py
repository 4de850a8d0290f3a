"""The curriculum against a sampler of lists, and what is refused before training."""

import pickle

import numpy as np
import pytest

from tests.reference import curriculum as reference
from tests.support.refusals import config_error, data_error
from zjax.data import curriculum, draws, metric_index
from zjax.data.metric_index import Index
from zjax.errors import DataError
from zjax.schedule.dropping import Picks
from zjax.schedule.pacing import Pacing, grow
from zjax.settings import schema

SEED, SIZE, STEPS, SAMPLES = 5, 6, 20, 230
VALUES = {
    "voc": np.random.default_rng(0).integers(1, 40, SAMPLES).astype(float),
    "seqreo": np.random.default_rng(1).integers(1, 9, SAMPLES).astype(float),
}
CASES = {
    "value": [("voc", grow(5, 40, 12), False)],
    "percentile": [("voc", grow(1, 100, 15, degree=2), True)],
    "empty-clusters": [("seqreo", Pacing((0, 4, 9, 10), (2, 3, 900, 901)), False)],
    "both": [("voc", grow(30, 100, 15), True), ("seqreo", grow(3, 9, 9), False)],
    "never-all": [("voc", grow(2, 7, 9), False)],
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make_index(name, values=None):
    values = VALUES[name] if values is None else values
    order = np.argsort(values, kind="stable")
    return Index(name, values[order], order)


def make_sampler(case, seed=SEED):
    difficulties = [
        curriculum.Difficulty(make_index(name), pacing, is_percentile)
        for name, pacing, is_percentile in case
    ]
    clusters = curriculum.Clusters(difficulties)
    return curriculum.CurriculumSampler(seed, clusters, SIZE)


def expected(case, num_steps=STEPS):
    metrics = [(VALUES[name].tolist(), p.at, kind) for name, p, kind in case]
    return reference.batches(metrics, num_steps, SEED, SIZE)


@each_case
def test_batches_are_those_of_lists_from_every_step_on(case):
    """Each from a new sampler, as after a resume; fails if difficulty is ignored."""
    found = [make_sampler(case).indices(step).tolist() for step in range(STEPS)]
    assert found == expected(case)


def test_batches_are_those_of_lists_across_blocks_of_draws():
    """Fails if a resumed sampler forgets how often a cluster was drawn."""
    case = CASES["value"]
    draws, batches = make_sampler(case), expected(case, 600)
    for step in (0, 255, 256, 511, 512, 599, 300):
        assert draws.indices(step).tolist() == batches[step]
    assert make_sampler(case).indices(599).tolist() == batches[599]


def test_steps_in_order_draw_few_numbers_and_permute_all_clusters_at_once(monkeypatch):
    """Fails if each step draws a block again, or permutes cluster by cluster."""
    drawn, permuted = list[int](), list[int]()
    draw, mix = Picks._draw, draws._feistel

    def count_steps(self, first, end):
        drawn.append(end - first)
        return draw(self, first, end)

    def count_calls(values, *cipher):
        permuted.append(len(values))
        return mix(values, *cipher)

    monkeypatch.setattr(Picks, "_draw", count_steps)
    monkeypatch.setattr(draws, "_feistel", count_calls)
    values = np.arange(200.0)
    easy = Pacing((0, *range(2, 101)), tuple(range(1, 200, 2)))
    index = Index("voc", values, np.arange(200))
    clusters = curriculum.Clusters([curriculum.Difficulty(index, easy, False)])
    batches = curriculum.CurriculumSampler(SEED, clusters, 400)
    for step in range(100, 400):
        batches.indices(step)
    assert sum(drawn) == 100 + 2 * 300 - 1
    assert len(permuted) < 20 * 300


@each_case
def test_no_sample_is_harder_than_its_step(case):
    draws = make_sampler(case)
    for step in range(STEPS):
        for name, pacing, is_percentile in case:
            difficulty = pacing.at(step + 1)
            values = VALUES[name].tolist()
            allowed = reference.admitted(values, difficulty, is_percentile)
            assert set(draws.indices(step).tolist()) <= allowed


def test_a_cluster_repeats_no_sample_until_all_are_drawn():
    draws = make_sampler([("voc", Pacing((0,), (99,)), False)])
    drawn = np.concatenate([draws.indices(step) for step in range(SAMPLES // SIZE)])
    assert len(set(drawn.tolist())) == len(drawn)


def test_another_seed_draws_others():
    case = CASES["value"]
    first, other = (make_sampler(case, seed).indices(9).tolist() for seed in (5, 6))
    assert first != other


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = metric_index.index_path("", "voc")
    metric_index.write_index(path, "voc", VALUES["voc"], "abcd")
    return path


def open_with(**settings):
    pacing = schema.LinearPacing(**settings.pop("pacing", {}))
    metric = schema.CurriculumMetric(index="voc.index", pacing=pacing, **settings)
    config = schema.Config(
        seed=SEED,
        global_batch_size=SIZE,
        curriculum=schema.Curriculum(metrics=(metric,)),
    )
    return curriculum.Curriculum(config, "abcd")


def test_the_last_value_is_the_largest_of_the_index(index):
    opened = open_with(difficulty="value", pacing={"start": 5, "num_steps": 12})
    assert [opened.values(step) for step in (1, 12)] == [
        {"difficulty_voc": 7.0},
        {"difficulty_voc": 39.0},
    ]
    case = [("voc", grow(5, 39, 12), False)]
    found = [opened.sampler.indices(step).tolist() for step in range(STEPS)]
    assert found == expected(case)


def test_the_position_tells_the_index_and_the_pacing(index):
    before = open_with().position
    metric_index.write_index(index, "voc", VALUES["voc"] + 1, "abcd")
    after = open_with(pacing={"num_steps": 7}).position
    changed = {name for name in before if before[name] != after[name]}
    names = {"curriculum.metrics[0].index", "curriculum.metrics[0].pacing.num_steps"}
    assert changed == names


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"difficulty": "value", "pacing": {"start": 50}},
            "curriculum.metrics[0].pacing.start=50 is not below the largest voc=39; "
            "use a smaller one",
        ),
        (
            {"difficulty": "value", "pacing": {"start": 0, "end": 3, "multiple": 1}},
            "curriculum.metrics[0].pacing.start=1 admits none of 230 samples in step 1 "
            "by voc; start at a higher difficulty",
        ),
    ],
    ids=["above-all", "none-in-step-1"],
)
def test_difficulties_that_do_not_fit_the_index_are_refused(index, settings, message):
    metric_index.write_index(index, "voc", VALUES["voc"].clip(3), "abcd")
    with config_error(message):
        open_with(**settings)


@pytest.mark.parametrize("names", [("voc",), ("voc", "seqreo")])
def test_worker_processes_get_the_files_and_not_the_samples(index, names):
    """Fails if an index is written into what each of them reads, or another is read."""
    difficulties = []
    for name in names:
        path, values = metric_index.index_path("", name), np.tile(VALUES[name], 50)
        metric_index.write_index(path, name, values, "abcd")
        opened = metric_index.open_index(path, "abcd")
        pacing = grow(10, 40, 12)
        difficulties.append(curriculum.Difficulty(opened, pacing, is_percentile=False))
    batches = curriculum.CurriculumSampler(
        SEED, curriculum.Clusters(difficulties), SIZE
    )
    sent = pickle.dumps(batches)
    assert len(sent) < 8 * 50 * SAMPLES / 4
    for step in (0, 5, 19):
        found = pickle.loads(sent).indices(step)
        np.testing.assert_array_equal(found, batches.indices(step))
    metric_index.write_index(index, "voc", VALUES["voc"], "abcd")
    with data_error(
        "index='voc.index' was replaced while the run started; start the run again"
    ):
        pickle.loads(sent)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def of_another_dataset(path):
    metric_index.write_index(path, "voc", VALUES["voc"], "dcba")


def with_nan(path):
    metric_index.write_index(path, "voc", np.append(VALUES["voc"], np.nan), "abcd")


def test_a_largest_value_that_is_not_exact_is_refused(index):
    """Fails if the pacing searches for such a number, which would not end."""
    metric_index.write_index(index, "voc", np.append(VALUES["voc"], 1e300), "abcd")
    with pytest.raises(DataError) as error:
        open_with(difficulty="value")
    field = "curriculum.metrics[0]"
    assert str(error.value) == (
        f"{field}.index='voc.index' holds 1e+300 as a value of voc, above the "
        "9,007,199,254,740,992 up to which a difficulty grows exactly; use "
        f"{field}.difficulty='percentile', or set {field}.pacing.end"
    )
    bounded = open_with(difficulty="value", pacing={"start": 5, "end": 39})
    assert bounded.values(1_000) == {"difficulty_voc": 39.0}


DAMAGE = {
    "cut": (cut, "is truncated: {short} bytes, but its header says {size}"),
    "damaged": (damage, "is damaged: it does not match its checksum"),
    "another": (of_another_dataset, "belongs to dataset dcba, but this one is abcd"),
    "nan": (with_nan, "holds nan as a value of voc"),
}


@pytest.mark.parametrize(("harm", "fault"), DAMAGE.values(), ids=DAMAGE)
def test_an_index_that_cannot_be_used_is_refused(index, harm, fault):
    size = index.stat().st_size
    harm(index)
    with pytest.raises(DataError) as error:
        open_with()
    remedy = "run `zjax data analyze` on this dataset"
    if harm is with_nan:
        remedy = "measure finite numbers, by `zjax data analyze`"
    fault = fault.format(short=size - 1, size=size)
    assert str(error.value) == (
        f"curriculum.metrics[0].index='voc.index' {fault}; {remedy}"
    )
