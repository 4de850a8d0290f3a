"""What must be the same in all processes of a run, and what may differ."""

import dataclasses
import json

import jax

from tests.support.refusals import process_error
from zjax.processes import agreement
from zjax.processes.agreement import (
    check_agreement,
    check_same,
    describe_process,
    disagreements,
    source_digest,
)
from zjax.settings import schema

CONFIG = schema.Config()


def told(*configs):
    return [str(x) for x in disagreements([describe_process(c) for c in configs])]


def test_each_setting_that_differs_is_named_with_both_values():
    assert told(CONFIG, CONFIG, CONFIG) == []
    other = schema.Config(seed=3, optimizer=schema.Optimizer(peak_learning_rate=0.5))
    assert told(CONFIG, CONFIG, other, other) == [
        "seed=3 on processes 2, 3 is 0 on process 0; make all processes the same",
        "optimizer.peak_learning_rate=0.5 on processes 2, 3 is 0.0003 on process 0; "
        "make all processes the same",
    ]


def test_paths_and_the_way_to_the_others_may_differ():
    other = schema.Config(
        directory="/mnt/runs",
        data=schema.Data(path="/mnt/tokens"),
        checkpoint=schema.Checkpoint(init_from="/mnt/weights"),
        zero=schema.Zero(offload=schema.Nvme(nvme_paths=("/mnt/disk",))),
        processes=schema.Processes(coordinator="a:1", process_id=1),
    )
    config = dataclasses.replace(CONFIG, zero=schema.Zero(offload=schema.Nvme()))
    assert told(config, other) == []


def test_software_and_options_of_jax_that_differ_are_named():
    own = describe_process(CONFIG)
    for name, value in (("jax", "0.0.1"), ("zjax_source", "f" * 16)):
        other = own | {"software": own["software"] | {name: value}}
        assert [str(x) for x in disagreements([own, other])] == [
            f"software.{name}={value!r} on process 1 is {own['software'][name]!r} on "
            "process 0; make all processes the same"
        ]
    with jax.default_matmul_precision("float32"):
        other = describe_process(CONFIG)
    assert [str(x) for x in disagreements([own, other])] == [
        "jax.jax_default_matmul_precision='float32' on process 1 is 'None' on process "
        "0; make all processes the same"
    ]


def test_flags_of_xla_count_but_for_where_it_writes(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    own = describe_process(CONFIG)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    assert disagreements([own, describe_process(CONFIG)]) == []
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    (problem,) = disagreements([own, describe_process(CONFIG)])
    assert problem.field == "XLA_FLAGS"


def test_the_digest_follows_the_source(tmp_path, monkeypatch):
    """Fails if a changed file, or one that was renamed, goes unseen."""
    digests = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2")):
        package = tmp_path / f"{name}{text}" / "mine"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / name).write_text(text)
        monkeypatch.syspath_prepend(package.parent)
        monkeypatch.setattr("zjax.processes.agreement._SOURCES", ("mine",))
        digests.add(source_digest())
    assert len(digests) == 3


def test_another_index_on_a_process_is_named(monkeypatch):
    """Fails if all draw samples by their own index; paths may differ."""
    metrics = (schema.CurriculumMetric(index="/mnt/voc.index"),)
    given = schema.Config(curriculum=schema.Curriculum(metrics=metrics))
    other = schema.CurriculumMetric(index="/data/voc.index")
    moved = schema.Config(curriculum=schema.Curriculum(metrics=(other,)))
    assert told(given, moved) == []
    field = "curriculum.metrics[0].index"
    mine, theirs = ({"step": 0, field: f"voc {n}"} for n in ("1f", "2f"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        agreement, "_gather", lambda text: [text, json.dumps(theirs).encode()]
    )
    with process_error(
        f"{field}='voc 2f' on process 1 is 'voc 1f' on process 0; make all processes "
        "the same"
    ):
        check_same(mine)


def test_one_process_agrees_with_itself():
    check_agreement(dataclasses.replace(CONFIG, seed=1))
