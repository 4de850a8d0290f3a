"""Every test sees 8 CPU devices, and implicit rank promotion is an error.

Programs are compiled once for all tests and for the programs that they start, and with
little optimisation: nothing here runs for long. Beside a GPU they are compiled as
users have them. Most of the time of the tests is that of the compiler, and kernels of
its older emitter, where JAX still has it, compile in half of it. Locations in programs
hold one frame each instead of a hundred: to write them, and to carry them through the
compiler, took a twentieth of the time.

Annotations are checked at every call of a function that bears them by its own name.
"""

import collections
import contextlib
import functools
import gc
import importlib
import itertools
import os
import pathlib
import types
import zlib

import jaxlib.version
import jaxtyping

# Cycles wait for more of their kind: to look for them after every 700 objects took a
# tenth of the time of imports, and of tests.
gc.set_threshold(50_000, 5, 5)
IS_NEW = jaxlib.version.__version_info__ >= (0, 11)
# Collectives of programs that newer versions load from a disk may wait for ever.
CACHE = "" if IS_NEW else pathlib.Path(__file__).parent / ".pytest_cache" / "programs"
MOST_MAPPINGS = 30_000
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
HAS_GPU = pathlib.Path("/dev/nvidiactl").exists()
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(not HAS_GPU)))
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "1")
if not IS_NEW:  # elsewhere an unknown flag is fatal
    QUICK = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )
    os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402  (reads the environment)
import pytest  # noqa: E402
from jax._src import compilation_cache, compiler  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

pytest.register_assert_rewrite("tests.support")
check_types = jaxtyping.jaxtyped


def check_shapes(function, typechecker):
    """Compares the shapes of a call: jaxtyping's own wrapper checks arguments twice."""
    checked = typechecker(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        with check_types("context"):
            return checked(*args, **kwargs)

    return call


def check_what_is_told(*function, typechecker):
    """Spares a fifth of the tests' time: shapes are compared where any are told.

    A function within another would be compiled anew whenever that is called.
    """
    if not function:
        return functools.partial(check_what_is_told, typechecker=typechecker)
    (own,) = function
    if getattr(own, "__code__", None):
        if "<locals>" in own.__qualname__:
            return own
        if "jaxtyping" not in str(own.__annotations__):
            return typechecker(own)
        return check_shapes(own, typechecker)
    return check_types(own, typechecker=typechecker)


jaxtyping.jaxtyped = check_what_is_told


def keep_programs(limit=1000):
    """Keeps the last programs as loaded: runs with equal settings share theirs.

    To read one again from the cache on disk takes as long as to compile a small one.
    """
    kept = collections.OrderedDict()
    read, write = compiler._cache_read, compiler._cache_write

    def read_kept(module_name, cache_key, *args):
        if cache_key not in kept:
            return read(module_name, cache_key, *args)
        kept.move_to_end(cache_key)
        return kept[cache_key], 0

    def write_kept(cache_key, seconds, module_name, backend, executable, callbacks):
        if not callbacks:
            kept[cache_key] = executable
            if len(kept) > limit:
                kept.popitem(last=False)
        write(cache_key, seconds, module_name, backend, executable, callbacks)

    compiler._cache_read, compiler._cache_write = read_kept, write_kept
    return kept


def compress_little():
    """Programs on the disk take a quarter more, and a third of the time to compress."""
    compilation_cache.zlib = types.SimpleNamespace(
        compress=functools.partial(zlib.compress, level=1), decompress=zlib.decompress
    )


def share_contexts(uses=100):
    """Programs are written in one context of MLIR: to make one takes 5 ms."""
    make, numbers = mlir.make_ir_context, itertools.count(1)
    shared = [make()]

    def make_at_times():
        if next(numbers) % uses == 0:  # it keeps whatever was written in it
            shared[0] = make()
        return shared[0]

    mlir.make_ir_context = make_at_times


KEPT = {} if IS_NEW else keep_programs()
if not IS_NEW:
    compress_little()
    share_contexts()

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """A process has at most 65,530 mappings, and a loaded program takes a few.

    Without a mapping XLA crashes. Programs that stay are no garbage: a generator
    collects what is left over when it begins, and would look at all of them each time.
    """
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        gc.unfreeze()
        KEPT.clear()
        jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def compiled_ahead():
    """Generators compile a pass when it runs: most tests need two or three of six.

    Under `with compiled_ahead():` they compile all at the start, as elsewhere.
    """
    name, patch = "zjax.generation.engine.Engine.compile", pytest.MonkeyPatch
    ahead = importlib.import_module("zjax.generation.engine").Engine.compile

    @contextlib.contextmanager
    def compile_ahead():
        with patch.context() as inner:
            inner.setattr(name, ahead)
            yield

    with patch.context() as outer:
        outer.setattr(name, lambda engine: None)
        yield compile_ahead


@pytest.fixture
def only_new_garbage():
    """`gc.collect` skips what exists by now: those of earlier tests take seconds."""
    gc.freeze()


@pytest.fixture
def untyped(monkeypatch):
    """Shapes and dtypes are not checked by annotations, as in programs of users."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def pytest_sessionstart():
    """Else a module whose examples run alone is imported by its package and again.

    What is imported by then is no garbage.
    """
    importlib.import_module("zjax")
    gc.freeze()
