"""A generator compiles while weights are read, each program once."""

import collections
import concurrent.futures
import contextlib
import gc
import threading
import time

import jax
import pytest

from tests.support import small_llama, small_run
from tests.support.allocated import bytes_here, weights_and_caches
from tests.support.refusals import config_error
from zjax.data.prompts import Prompts
from zjax.data.tokenizer import make_bytes
from zjax.errors import CheckpointError
from zjax.generation import cutting, loading, programs, sizes
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling
from zjax.run.weights import open_run

pytestmark = pytest.mark.usefixtures("greedy")

COMPILED = "/jax/core/compile/backend_compile_duration"
PASSES = "jit(run_pass)", "jit(run_steps)"
SPLIT = "zero.stage=3", "model.moe.num_experts=4", "mesh.expert=2", "mesh.tensor=2"
SPLIT += "mesh.sequence=2", "model.num_layers=2"
"""Settings of a run whose rows, heads, experts and tokens are split."""


@pytest.fixture
def ahead(compiled_ahead):
    with compiled_ahead():
        yield


@contextlib.contextmanager
def noted_programs():
    """Yields a list that gets the name of each program that is compiled inside."""
    names = []

    def listen(event, duration_secs, **about):
        if event == COMPILED:
            names.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def num_passes(names):
    return sum(name in PASSES for name in names)


def wait_for(holds):
    """Waits until something holds, or for 100 seconds."""
    end = time.monotonic() + 100
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)


def write_all_sizes(generator):
    """Texts whose passes have all sizes of one row or two."""
    prompts = ["abc", "hello world", "a"]
    texts = generator.generate(prompts, Sampling(max_new_tokens=20))
    texts += generator.generate(["x"], Sampling(max_new_tokens=9))
    next(generator.stream("y", Sampling(max_new_tokens=2)))
    return [text.ids for text in texts]


def directory(tmp_path, max_length):
    folder = small_llama.write(tmp_path / "llama", max_length=max_length)
    return lambda: folder


def run(*settings):
    """Function that writes a run, and returns what opens the weights."""

    def write(tmp_path, max_length):
        model = {"model": {"max_length": max_length, "vocab_size": 260}}
        given = tmp_path / "run", model, "model.dropout_rate=0", *settings
        small_run.stop(*given, steps=0)
        config = small_run.make_config(*given)
        return lambda: open_run(config, "raw", 0, Prompts(make_bytes()))[0]

    return write


# Lengths differ, as programs of equal models are shared. One case has the sizes of two
# rows: each size takes a second or more to compile.
@pytest.mark.parametrize(
    ("write", "max_length", "max_rows", "dtypes"),
    [
        (directory, 72, 2, {}),
        (directory, 73, 1, {"weight_dtype": "int8", "cache_dtype": "float8"}),
        (directory, 74, 1, {"weight_dtype": "int4"}),
        (run(*SPLIT), 75, 1, {}),
    ],
    ids=["directory", "int8", "int4", "mesh"],
)
def test_all_sizes_compile_once_before_the_weights_are_there(
    tmp_path, monkeypatch, ahead, write, max_length, max_rows, dtypes
):
    """Fails if programs wait for the weights, or calls compile again, or texts change.

    The source of the weights waits until all sizes are compiled.
    """
    compiled, load, open_weights = [], loading.load_weights, write(tmp_path, max_length)
    num_sizes = len(sizes.sizes_of(max_rows))

    def load_late(*given):
        wait_for(lambda: num_passes(names) >= num_sizes)
        compiled.append(num_passes(names))
        return load(*given)

    monkeypatch.setattr(loading, "load_weights", load_late)
    source, numbers = open_weights(), {"max_rows": max_rows} | dtypes
    with noted_programs() as names, Generator(source, **numbers) as made:
        texts = write_all_sizes(made)
        assert compiled == [num_sizes]
        counts = collections.Counter(names)
        assert num_passes(names) == num_sizes, counts
        assert {counts[x] for x in ("jit(cut_block)", "jit(empty_caches)")} == {1}
    monkeypatch.setattr(cutting.Unread, "can_wait", False)
    with Generator(open_weights(), **numbers) as made:
        assert write_all_sizes(made) == texts


@pytest.mark.parametrize("can_wait", [True, False])
@pytest.mark.parametrize("weight_dtype", ["compute", "int8"])
def test_pages_leave_room_for_weights_to_come(
    tmp_path, monkeypatch, can_wait, weight_dtype
):
    """Fails if weights that are still to be read are taken for free memory."""
    limit, page_bytes = 2_000_000, 64 * 2 * 16 * 2
    gc.collect()
    before = bytes_here(jax.live_arrays())

    def free_bytes(device):
        return limit - (bytes_here(jax.live_arrays()) - before)

    monkeypatch.setattr(sizes, "_free_bytes", free_bytes)
    monkeypatch.setattr(cutting.Unread, "can_wait", can_wait)
    folder = small_llama.write(tmp_path / "llama", max_length=2**14)
    with Generator(folder, max_rows=2, weight_dtype=weight_dtype) as made:
        weights, caches = weights_and_caches(made)
        num_pages = made.num_pages
    assert caches == num_pages * page_bytes
    assert num_pages == int(0.9 * (limit - weights)) // page_bytes


@pytest.mark.parametrize(
    ("free_share", "settings", "can_wait"),
    [
        (1.2, (), True),
        (1.05, (), False),
        (None, (), True),
        (None, ("mesh.pipeline=2", "model.num_layers=2"), False),
    ],
    ids=["room", "tight", "unknown", "stages"],
)
def test_weights_that_fill_a_device_are_read_alone(
    monkeypatch, free_share, settings, can_wait
):
    """Fails if XLA measures kernels in memory that the reading needs."""
    config = small_run.make_config("never/written", *settings)
    model, plan = loading.plan_weights(config)
    opened = loading.read_decoder(model, plan, Prompts(make_bytes()), "nowhere")
    plans = jax.tree.leaves(opened.unread.plans)
    whole = sum(x.device_bytes for x in plans)
    free = None if free_share is None else int(free_share * whole)
    monkeypatch.setattr(sizes, "_free_bytes", lambda _: free)
    assert opened.unread.can_wait == can_wait


def test_programs_are_dropped_when_the_weights_cannot_be_read(
    tmp_path, monkeypatch, ahead
):
    """Fails if a broken file leaves a thread, or programs that nobody calls."""
    folder = small_llama.write(tmp_path / "llama", max_length=77)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    gate, threads, started = threading.Event(), set(threading.enumerate()), []
    load = loading.load_weights

    def load_late(*given):
        wait_for(lambda: started)
        return load(*given)

    def noted(task):
        started.append(submit(task))
        return started[-1]

    monkeypatch.setattr(loading, "load_weights", load_late)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        submit = executor.submit
        submit(gate.wait)
        monkeypatch.setattr(executor, "submit", noted)
        monkeypatch.setattr(programs, "_compilers", lambda: executor)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            Generator(folder, max_rows=2)
        threads = {x.name for x in set(threading.enumerate()) - threads}
        gate.set()
    assert "zjax-generation" not in threads
    assert started and all(x.cancelled() for x in started)


def test_numbers_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    def unreadable(*_):
        raise AssertionError("weights are read")

    folder = small_llama.write(tmp_path / "llama", max_length=64)
    monkeypatch.setattr(loading, "load_weights", unreadable)
    with config_error("max_rows=0 is not between 1 and 256; use 64"):
        Generator(folder, max_rows=0)
