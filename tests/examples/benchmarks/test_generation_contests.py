"""The contests of generation and serving: programs on small models, to the end."""

import dataclasses
import json
import sys

import jax
import pytest
from contests.contest import load_contest

from tests.support.benchmarks import FOLDER, load
from zjax.generation.sizes import PAGE_SIZE

SHORT = "--num_given=20", "--num_new=12", "--num_warm_ups=1", "--num_rounds=2"


def printed(module, monkeypatch, capfd, *flags):
    """What a program prints for its contest."""
    monkeypatch.setattr(sys, "argv", ["program.py", *flags])
    module.main()
    return json.loads(capfd.readouterr().out.rpartition("RESULT ")[2])


def metrics_of(name, contestant):
    """Metrics that a contest asks of a program."""
    for row in load_contest(FOLDER / f"{name}.py").rows:
        for case in row.cases:
            if contestant in case.ours:
                yield case.metric
            if isinstance(case.peer, tuple) and contestant in case.peer:
                yield case.peer_metric or case.metric


@pytest.mark.usefixtures("greedy")
def test_a_start_from_nothing_counts_all_passes(monkeypatch, capfd, compiled_ahead):
    """Fails if a pass is not counted, or the shape is not new."""
    module = load("compile_ours")
    # Programs of other tests would be found.
    jax.clear_caches()
    monkeypatch.setattr(module, "MAX_ROWS", 4)
    monkeypatch.setattr(module, "ALL_ROWS", (1, 4))
    monkeypatch.setattr(module, "SECOND", (2, 70))
    with compiled_ahead():
        found = printed(module, monkeypatch, capfd, "--quick")
    jax.config.update("jax_enable_compilation_cache", True)
    assert {*metrics_of("generation", "zjax 48 layers")} <= {*found}
    # Passes of one and four rows, of a token and of several, and of chunks; a row is
    # set, pages are made.
    assert found["num_programs"] == 5 < found["num_all_programs"]
    assert found["cold_seconds"] > found["second_seconds"] > 0


def test_weights_come_from_the_host(monkeypatch, capfd):
    """Fails if blocks are on the device, or their bytes are not those of the model."""
    module = load("host_decode_ours")
    # Smaller arrays stay on the device.
    shape = dataclasses.replace(module.SHAPES["tiny"], embed_size=256, mlp_size=1024)
    monkeypatch.setitem(module.SHAPES, "tiny", shape)
    monkeypatch.setattr(module, "ROUNDS", 2)
    made, make_run = [], module.make_run
    monkeypatch.setattr(
        module, "make_run", lambda *given: made.append(make_run(*given)) or made[0]
    )
    found = printed(module, monkeypatch, capfd, "--shape=tiny", "--num_rows=3")
    assert {*metrics_of("generation", "zjax host")} <= {*found}
    assert found["tokens/s"]["n"] == 2
    [run] = made
    stored = jax.tree.leaves(run.decoder(run.state).stored)
    large = [x for x in stored if x.nbytes >= 2**18]
    assert {x.sharding.memory_kind for x in large} == {"pinned_host"}
    num_bytes = found["host bytes/s"]["median"] / found["tokens/s"]["median"] * 3
    other = 2 * shape.vocab_size * 256 + 256  # table, head and the last norm
    assert num_bytes == pytest.approx(2 * (shape.num_params - other))


def test_rates_of_others_grow_with_the_memory(monkeypatch, capfd):
    module = load("published_rates")
    found = printed(module, monkeypatch, capfd, "--num_floats=1024")
    copy = found["copy_bytes_per_second"]["median"]
    [metric] = metrics_of("generation", "vLLM on H100 as published")
    assert found[metric]["median"] == pytest.approx(6612 * copy / 3e12)


def test_workloads_are_named_as_the_contest_asks():
    cases, named = load("decode_cases"), set()
    parser = cases.make_parser()
    cases.add_workload(parser)
    parser.add_argument("--max_rows")
    parser.add_argument("--in_batches", action="store_true")
    contest = load_contest(FOLDER / "generation.py")
    for contestant in contest.contestants:
        if "--continuous" in contestant.command:
            words = [x for x in contestant.command if x.startswith("--")]
            given, _ = parser.parse_known_args(words)
            named = {x.metric for x in cases.make_workloads(given)}
            assert {*metrics_of("generation", contestant.name)} == named


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("engine", [(), ("--engine",)])
def test_a_server_and_its_engine_are_measured_alike(engine, monkeypatch, capfd):
    """Fails if clients of the server get other texts than the engine is asked for."""
    module = load("serve_ours")
    flags = "--shape=tiny", "--clients=2", *SHORT, *engine
    found = printed(module, monkeypatch, capfd, *flags)
    contestant = "engine alone" if engine else "zjax serve"
    asked = {x.replace("128 ", "2 ") for x in metrics_of("serving", contestant)}
    # Texts of so few tokens may end between two looks at the metrics.
    assert asked - {"2 clients live share"} <= {*found}
    assert found["2 clients tokens/s"]["n"] == 2
    assert found["idle first_seconds"]["n"] == 7


def test_tokens_over_those_that_pages_hold():
    module = load("serve_clients")
    assert module.PAGE_SIZE == PAGE_SIZE
    before = {"tokens_read_total": 100.0, "tokens_written_total": 50.0}
    numbers = {"tokens_read_total": 180.0, "tokens_written_total": 66.0}
    replies = [module.Reply(), module.Reply()]

    class Server:
        """A server whose clients get a token, and then all others."""

        num_looks = 0

        async def metrics(self):
            self.num_looks += 1
            if self.num_looks == 1:
                return before
            if self.num_looks == 4:
                replies[0].last = replies[1].last = 1.0
            return numbers | {"pages_live": 2.0}

    async def watch():
        shares = []
        replies[0].first = replies[1].first = 1.0
        await module.watch(Server(), replies, shares)
        return shares

    # 80 tokens of prompts and 16 new ones, in two pages; not once texts have ended.
    assert module.asyncio.run(watch()) == [96 / 128, 96 / 128]


def test_a_picture_of_more_and_more_clients(tmp_path, monkeypatch):
    module = load("serve_load")
    monkeypatch.setattr(module, "CLIENTS", (1, 2))
    words = "--shape=tiny", f"--output={tmp_path}", *SHORT
    monkeypatch.setattr(sys, "argv", ["serve_load.py", *words])
    module.main()
    points = json.loads((tmp_path / "points" / "serve_load.json").read_text())
    assert {"1 clients tokens/s", "2 clients first_seconds", "date"} <= {*points}
    assert (tmp_path / "serve_load.png").stat().st_size > 5_000


def test_texts_are_written_with_drafts_and_without(monkeypatch, capfd):
    """Fails if both ways are one, or write other texts."""
    module = load("speculation_ours")
    shape = dataclasses.replace(module.SHAPES["tiny"], num_layers=1)
    monkeypatch.setitem(module.SHAPES, "tiny", shape)
    for name, value in (("WARM_UPS", 1), ("ROUNDS", 2), ("NUM_NEW", 96)):
        monkeypatch.setattr(module, name, value)
    cases = {"1 text": (1, 0.0), "8 texts": (2, 0.0), "8 drawn texts": (2, 3.0)}
    assert cases.keys() == module.CASES.keys()
    monkeypatch.setattr(module, "CASES", cases)
    found = printed(module, monkeypatch, capfd, "--quick")
    for name in ("zjax drafts", "zjax plain"):
        wanted = {*metrics_of("speculation", name)}
        assert wanted and wanted <= {*found}
    for name in cases:
        assert found[f"{name}, equal share"]["min"] == 1
        assert found[f"{name}, plain tokens/s"]["n"] == 2
    assert 0 < found["1 text, accepted"] <= found["1 text, drafts"]
    assert found["8 drawn texts, drafts"] == 0
