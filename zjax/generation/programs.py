"""Programs of the passes of a decoder whose weights are on the devices."""

import concurrent.futures
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Int

from zjax.generation.cutting import (
    Unread,
    cut_weights,
    outputs_of,
    planned_bytes,
    planned_weights,
)
from zjax.generation.dtypes import COMPUTE, Dtypes
from zjax.generation.pages import bytes_on_device
from zjax.generation.passes import (
    DIMS_OF_ROWS,
    Reader,
    Rows,
    Weights,
    run_pass,
    run_steps,
)
from zjax.generation.plan import Pieces
from zjax.generation.sampling import Chosen
from zjax.generation.shards import (
    by_shard,
    num_shards,
    pin_results,
    send,
    shard_axes,
)
from zjax.jaxprs.versions import knows_option
from zjax.models.continuation import params_of
from zjax.models.stack import Decoder
from zjax.ops.narrow import describe_products
from zjax_kernels.decode.product.tuning import num_bits


@runtime_checkable
class Passes(Protocol):
    """Reads passes, and remembers the tokens and the keys of all rows."""

    def remember(self, slots: np.ndarray, tokens: Sequence[np.ndarray]) -> None:
        """Stores the tokens of a row that begins in a slot of each shard."""
        ...

    def load(self) -> None:
        """Reads the weights, unless they are where passes read them."""
        ...

    def compile(
        self, rows: Rows, pieces: Sequence[Pieces], sizes: Sequence[int], num_steps: int
    ) -> None:
        """Starts to compile what `read` runs for such pieces, as far as that helps."""
        ...

    def read(
        self, rows: Rows, pieces: Sequence[Pieces], sizes: Sequence[int], num_steps: int
    ) -> Chosen:
        """Reads pieces of up to `sizes` tokens; returns new tokens [T, pieces].

        Several steps read lanes of one token each, and T is the most tokens of a lane
        or more; rows behind mean nothing. With drafts T is the size of the lanes. The
        arrays may still be on the way.
        """
        ...

    def rest(self) -> None:
        """Frees what was fetched for a next pass."""
        ...

    def close(self) -> None:
        """Drops what has not begun to compile; no pass follows."""
        ...


def read_in_turn(
    read: Callable[[list[Pieces]], Chosen],
    pieces: Sequence[Pieces],
    sizes: Sequence[int],
    num_steps: int,
) -> Chosen:
    """Reads the steps of a pass by a program for one, see `Passes.read`."""
    found = []
    steps_alone = tuple(sizes) == (1,)
    # A step that no lane needs would read the whole model for nothing.
    needed = max(1, int(np.max(pieces[0].counts)))
    for step in range(min(num_steps, needed)):
        found.append(read([x.at(step) if steps_alone else x for x in pieces]))
    return jax.tree.map(lambda *steps: jnp.concatenate(steps), *found)


class History:
    """Tokens of all slots, on the devices.

    Args:
        num_slots: Rows at once on a shard.
        max_length: Most tokens of a row.
        axes: Mesh axes that split rows into data shards.
    """

    def __init__(self, num_slots: int, max_length: int, axes: tuple[str, ...] = ()):
        # The last slot of a shard belongs to padding.
        self._axes, shape = axes, (num_shards(axes) * (num_slots + 1), max_length)
        self.tokens: Int[Array, "slots S"] = send(np.zeros(shape, np.int32), axes)

    def set_rows(self, slots: np.ndarray, tokens: Sequence[np.ndarray]) -> None:
        """Replaces the tokens of a slot of each shard."""
        rows = np.zeros((len(slots), self.tokens.shape[1]), np.int32)
        for row, each in zip(rows, tokens, strict=True):
            row[: len(each)] = each
        self.tokens = _set_rows(self._axes, self.tokens, slots, rows)


class Programs:
    """Passes in one program each, with weights, pages and tokens on the devices.

    Args:
        reader: Functions of the decoder.
        weights: Weights of the decoder, cut by `Reader.cut`; with `read`, shapes and
            shardings of the weights.
        read: Function that reads the weights, called by `load`; None if `weights` are
            arrays.
        num_slots: Rows at once on a shard, 1 or more.
        max_length: Most tokens of a row.
        num_pages: Pages of the cache of a shard with the sink, 2 or more.
        page_size: Tokens of a page.
    """

    def __init__(
        self,
        reader: Reader,
        weights: Weights,
        read: Callable[[], Weights] | None = None,
        *,
        num_slots: int,
        max_length: int,
        num_pages: int,
        page_size: int,
    ):
        self._reader, self._weights, self._read_weights = reader, weights, read
        self._history = History(num_slots, max_length, shard_axes())
        self._page_shape = num_pages, page_size
        if read is None:
            self._caches = _empty_caches(reader, weights, *self._page_shape)
        else:  # the memory of the pages may be needed to read the weights
            lowered = _empty_caches.lower(reader, weights, *self._page_shape)
            self._caches = outputs_of(lowered.compile())
        mesh, self._placed = jax.sharding.get_abstract_mesh(), None
        if not mesh.empty:
            replaced = self._caches, self._history.tokens
            self._placed = *jax.tree.map(lambda x: x.sharding, replaced), None
        several = not mesh.empty and mesh.size > 1
        self._is_alone = several and jax.default_backend() == "cpu"
        self._compiling: dict[Any, concurrent.futures.Future[Any]] = {}
        self._scores_prompts = self._records = False
        self._is_closed = False

    def remember(self, slots: np.ndarray, tokens: Sequence[np.ndarray]) -> None:
        """Stores the tokens of a row that begins in a slot of each shard."""
        self._history.set_rows(slots, tokens)

    def load(self) -> None:
        """Reads the weights and makes the pages, unless the weights are arrays."""
        if self._read_weights is not None:
            self._weights, self._read_weights = self._read_weights(), None
            inputs = self._reader, self._weights, *self._page_shape
            self._caches = _empty_caches(*inputs)

    def compile(
        self, rows: Rows, pieces: Sequence[Pieces], sizes: Sequence[int], num_steps: int
    ) -> None:
        """Starts to compile what `read` runs for such pieces, in a thread."""
        if self._is_closed:
            return
        run, inputs = self._program(rows, pieces, sizes, num_steps)
        # Traced here, as a mesh is in use for one thread. Calls find what is compiled.
        compile = run.lower(*inputs).compile
        self._compiling[_shape_of(pieces), num_steps] = _compilers().submit(compile)

    def read(
        self, rows: Rows, pieces: Sequence[Pieces], sizes: Sequence[int], num_steps: int
    ) -> Chosen:
        """Reads pieces of up to `sizes` tokens; see `Passes`."""
        started = self._compiling.pop((_shape_of(pieces), num_steps), None)
        if started is not None:
            started.result()
        self._log_programs(pieces)
        run, inputs = self._program(rows, pieces, sizes, num_steps)
        results = run(*inputs)
        self._caches, self._history.tokens, chosen = results
        # Collectives of two programs would share the threads of simulated devices.
        return jax.block_until_ready(chosen) if self._is_alone else chosen

    def rest(self) -> None:
        """Does nothing: all weights stay on the devices."""

    def close(self) -> None:
        """Drops what has not begun to compile: a process would end later for it."""
        self._is_closed = True
        # A copy: another thread may be starting programs.
        for started in list(self._compiling.values()):
            started.cancel()

    def _log_programs(self, pieces: Sequence[Pieces]) -> None:
        """Logs once that requests wait for programs that few requests need."""
        if not self._scores_prompts and pieces[-1].num_best is not None:
            self._scores_prompts = True
            text = "text: compiling the pass that scores prompts, for the first request"
            logging.info("%s with prompt_logprobs", text)
        if not self._records and pieces[0].records is not None:
            self._records = True
            text = "text: compiling the passes that return experts, for the first"
            logging.info("%s request with experts", text)

    def _program(
        self, rows: Rows, pieces: Sequence[Pieces], sizes: Sequence[int], num_steps: int
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns the program of a pass, and the inputs."""
        state = self._weights, self._caches, self._history.tokens, rows
        if num_steps > 1:
            (piece,) = pieces
            return _run_steps(self._placed), (self._reader, num_steps, *state, piece)
        inputs = self._reader, tuple(sizes), *state, tuple(pieces)
        return _run_pass(self._placed), inputs


class CutDecoder:
    """A decoder on the devices, with weights cut for passes.

    Args:
        model: Decoder with weights in the dtype to compute in.
        dtypes: How weights and keys are stored.
        unread: Weights of a decoder that has none, which are deleted block by block as
            they are cut; None cuts the weights of the decoder.
    """

    def __init__(
        self, model: Decoder, dtypes: Dtypes = COMPUTE, unread: Unread | None = None
    ):
        self.config = model.config
        self._reader, self._unread = Reader.of(model, dtypes), None
        self.pending_bytes = 0
        """Bytes on a device of weights that `Passes.load` will read."""
        if unread is None:
            params = params_of(model)
            self._weights = cut_weights(self._reader, params, is_owned=False)
        elif unread.can_wait:
            self._unread = unread
            self._weights = planned_weights(self._reader, unread.plans)
            self.pending_bytes = planned_bytes(self._weights)
        else:
            self._weights = _read(self._reader, unread)
        _report(dtypes, self._weights)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split rows, under the mesh of the passes."""
        return shard_axes()

    def passes(self, **shapes: int) -> Programs:
        """Makes passes of the shapes that `Programs` takes."""
        read = None
        if self._unread is not None:
            read = functools.partial(_read, self._reader, self._unread)
        return Programs(self._reader, self._weights, read, **shapes)

    def page_bytes(self, page_size: int) -> int:
        """Counts the bytes on a device of a page of all layers."""
        return page_bytes(self._reader, self._weights, page_size)


def _read(reader: Reader, unread: Unread) -> Weights:
    """Reads weights and cuts them."""
    return cut_weights(reader, unread.read(), is_owned=True)


def page_bytes(reader: Reader, weights: Weights, page_size: int) -> int:
    """Counts the bytes on a device of a page of all layers."""
    return sum(layer_page_bytes(reader, weights, page_size))


def layer_page_bytes(reader: Reader, weights: Weights, page_size: int) -> list[int]:
    """Counts the bytes on a device of a page of each layer."""
    # Traced once for all generators of a model, of which rollouts make one each.
    blocks = _empty_caches.eval_shape(reader, weights, 1, page_size)
    return [sum(map(bytes_on_device, x.stored)) for layers in blocks for x in layers]


def _shape_of(pieces: Sequence[Pieces]) -> tuple[Any, ...]:
    """Returns the number of pieces of each kind, with the number of drafts."""
    return tuple((x.drafts.shape, x.records is None) for x in pieces)


@functools.cache
def _compilers() -> concurrent.futures.Executor:
    """Makes the threads that compile programs, a core for each."""
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count())


def _report(dtypes: Dtypes, weights: Weights) -> None:
    """Logs which arrays are stored in fewer bits, and how products read codes."""
    if dtypes.weights != "compute":
        blocks = jax.tree.leaves(weights.blocks)
        num_bytes = sum(x.size * num_bits(x.dtype) // 8 for x in blocks)
        how = describe_products(dtypes.weights)
        text = "weights of blocks in %s take %.2f GB: %s"
        logging.info(text, dtypes.weights, num_bytes / 1e9, how)
    if dtypes.cache != "compute":
        text = "keys and values in %s: magnitudes beyond 448 become 448"
        logging.info(text, dtypes.cache)


# The reader is static: weights of another step reuse the programs. Made when they are
# first needed, as options depend on the platform. Results have the very shardings of
# what they replace: an equal one with another spec would compile all passes again.
@functools.cache
def _run_pass(placed: Any) -> Any:
    """Makes the program of `run_pass`, with the shardings of the results."""
    return _jit_by_shard(run_pass, placed)


@functools.cache
def _run_steps(placed: Any) -> Any:
    """Makes the program of `run_steps`, with the shardings of the results."""
    return _jit_by_shard(run_steps, placed)


def _jit_by_shard(run: Callable[..., Any], placed: Any) -> Any:
    """Makes the program that runs a pass on each data shard of the mesh in use."""

    @functools.wraps(run)  # the name of the program
    def run_all(reader: Reader, sizes: Any, *arrays: Any) -> tuple[Any, ...]:
        each = functools.partial(run, reader, sizes)
        # Weights, pages, history, rows and pieces.
        ins, outs = (None, 0, 0, 0, 0), (0, 0, DIMS_OF_ROWS)
        mapped = by_shard(each, shard_axes(), ins, outs)
        caches, history, chosen = mapped(*arrays)
        return caches, history, pin_results(chosen)

    return jax.jit(
        run_all,
        static_argnums=(0, 1),
        donate_argnums=(3, 4),
        out_shardings=placed,
        compiler_options=_options(),
    )


def _options() -> dict[str, Any]:
    """Compiler options of passes by name; options that this XLA lacks are left out."""
    if jax.default_backend() != "gpu":
        return {}
    # Short sequences of kernels become CUDA graphs too: between two kernels of Pallas
    # there are a few, and launches one by one leave gaps of 4 % of a token.
    options: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1}
    # A kernel would read a part of a larger array in place, such as the queries of
    # chunks: Mosaic refuses parts that do not begin at a multiple of 256 bytes.
    options["xla_gpu_enable_dynamic_slice_fusion"] = False
    return {name: x for name, x in options.items() if knows_option(name, x)}


_empty_caches = jax.jit(Reader.empty_caches, static_argnums=(0, 2, 3))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _set_rows(
    axes: tuple[str, ...],
    history: Int[Array, "slots S"],
    slots: Int[Array, " shards"],
    rows: Int[Array, "shards S"],
) -> Int[Array, "slots S"]:
    """Replaces the tokens of a slot of each shard."""

    def set_row(history: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
        return history.at[slots].set(rows)

    return by_shard(set_row, axes, (0, 0, 0), 0)(history, slots, rows)
