"""Passes of a causal model that keeps no keys: each token reads the whole text again.

Any function from tokens to logits can so write text. Texts are padded on the right to
few lengths, which a causal model does not see; rows without a token to come are left
out. Each length compiles when a text first has it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Float, Int

from zjax.errors import ConfigError, Problem
from zjax.generation.passes import Head, Rows, choose, score_prompts
from zjax.generation.plan import Pieces, lay_tasks
from zjax.generation.programs import History, read_in_turn
from zjax.generation.sampling import MAX_LOGPROBS, Chosen, Logprobs
from zjax.generation.sizes import sizes_of
from zjax.jaxprs.versions import dtype_promotion
from zjax.processes.barrier import describe_error
from zjax.settings import schema
from zjax.sharding.activations import pin_everywhere, pin_rows
from zjax.sharding.mesh import is_simulated

Score = Callable[[Any, Int[Array, "B L"]], Float[Array, "B L V"]]
"""`score(weights, tokens) -> logits` of the next token at every place."""
_SHORTEST = 64
"""Least length to which texts are padded; longer ones are padded to powers of two."""
_LOGITS_BYTES = 2**30
"""Most bytes of the logits of all places, of which a pass reads a place of each row."""
_TOLERANCE = 1e-2
"""Largest change of early logits by later tokens, over the largest logit."""


class Recomputed:
    """A causal model without a cache, for `zjax.Generator`.

    Args:
        score: Function from weights and tokens to logits.
        weights: Weights on the devices.
        max_length: Most tokens of a text, 2 or more.
        name: Name of the function in messages.

    Raises:
        ConfigError: The function gives no logits, or logits that later tokens change.
    """

    def __init__(self, score: Score, weights: Any, max_length: int, name: Any = None):
        self.score, self.weights, self.pending_bytes = score, weights, 0
        self.axes: tuple[str, ...] = ()
        vocab_size = _find_vocab_size(score, weights, max_length, name)
        self.config = schema.Model(vocab_size=vocab_size, max_length=max_length)
        """Settings of a built-in decoder with texts of equal length and vocabulary."""
        _check_causal(score, weights, self.config, name)
        if jax.process_index() == 0:
            logging.warning(
                "text: the model keeps no keys, so that every token reads its whole "
                "text again and the time of a text grows with the square of its "
                "length; write short texts, or use the built-in decoder"
            )

    def passes(self, **shapes: int) -> "RecomputedPasses":
        """Makes passes of the shapes that `Programs` takes."""
        return RecomputedPasses(self, **shapes)

    def page_bytes(self, page_size: int) -> int:
        """Counts no bytes: pages hold nothing."""
        return 0


class RecomputedPasses:
    """Passes that read whole texts; see `zjax.generation.programs.Passes`.

    All devices are one data shard: there are no pages to split, and the compiler splits
    the rows of a pass over the batch axes, as in training.
    """

    def __init__(
        self,
        model: Recomputed,
        *,
        num_slots: int,
        max_length: int,
        num_pages: int,
        page_size: int,
    ):
        del num_pages, page_size  # nothing is stored
        self._model, self._max_length = model, max_length
        self._num_rows = sorted({size.lanes for size in sizes_of(num_slots)})
        self._history = History(num_slots, max_length)
        mesh = jax.sharding.get_abstract_mesh()
        self._is_alone = not mesh.empty and mesh.size > 1 and is_simulated(mesh)
        # Made here: programs end with the generator, and do not hold its model.
        static = "length", "num_columns"
        self._program = jax.jit(self._run, donate_argnums=1, static_argnames=static)
        static = "length", "size"
        self._score_program = jax.jit(self._score, static_argnames=static)

    def remember(self, slots: np.ndarray, tokens: Sequence[np.ndarray]) -> None:
        """Stores the tokens of a row that begins in a slot."""
        self._history.set_rows(slots, tokens)

    def load(self) -> None:
        """Does nothing: the weights are on the devices."""

    def compile(
        self, rows: Rows, pieces: Sequence[Pieces], sizes: Sequence[int], num_steps: int
    ) -> None:
        """Does nothing: the lengths of texts, which programs depend on, come later."""

    def read(
        self, rows: Rows, pieces: Sequence[Pieces], sizes: Sequence[int], num_steps: int
    ) -> Chosen:
        """Reads pieces of up to `sizes` tokens; see `Passes`."""

        def read(pieces):
            return self._read_once(rows, _join(pieces))

        chosen = read_in_turn(read, pieces, sizes, num_steps)
        if pieces[-1].num_best is None:
            return chosen
        return chosen._replace(prompt=self._score_once(pieces[-1], sizes[-1]))

    def rest(self) -> None:
        """Does nothing: all weights stay on the devices."""

    def close(self) -> None:
        """Does nothing: no program is compiled ahead."""

    def _read_once(self, rows: Rows, pieces: Pieces) -> Chosen:
        """Chooses tokens after each piece that ends a row."""
        columns = np.flatnonzero(pieces.ends)
        num_columns = len(pieces.slots)
        if not len(columns):  # parts of prompts, which are read when they end
            shape = 1, num_columns, min(MAX_LOGPROBS, self._model.config.vocab_size)
            ints, floats = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
            return Chosen(ints[..., 0], floats[..., 0], ints, floats)
        num_rows = next(x for x in self._num_rows if x >= len(columns))
        length = (pieces.starts + pieces.counts)[columns].max()
        fill, no_slot = num_rows - len(columns), self._history.tokens.shape[0] - 1
        padded = Pieces(*(x[columns] for x in pieces[:5]))
        padded = _join([padded, lay_tasks([[]], fill, no_slot, pieces.num_drafts)])
        self._history.tokens, chosen = self._program(
            self._model.weights,
            self._history.tokens,
            rows,
            padded,
            np.concatenate([columns, np.full(fill, num_columns)]).astype(np.int32),
            length=min(_padded(int(length)), self._max_length),
            num_columns=num_columns,
        )
        # Collectives of two programs would share the threads of simulated devices.
        return jax.block_until_ready(chosen) if self._is_alone else chosen

    def _score_once(self, pieces: Pieces, size: int) -> Logprobs:
        """Scores the tokens of chunks of up to `size` tokens that ask for it."""
        length = int((pieces.starts + pieces.counts).max())
        prompt = self._score_program(
            self._model.weights,
            self._history.tokens,
            pieces,
            length=min(_padded(length), self._max_length),
            size=size,
        )
        return jax.block_until_ready(prompt) if self._is_alone else prompt

    def _score(
        self,
        weights: Any,
        history: Int[Array, "slots S"],
        pieces: Pieces,
        *,
        length: int,
        size: int,
    ) -> Logprobs:
        """Reads the text of each chunk up to the chunk's end; see `score_prompts`."""
        places = pieces.starts[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        chunks = jnp.minimum(places, length - 1), history[pieces.slots, :length]

        def score(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
            places, tokens = chunk
            return self._model.score(weights, pin_rows(tokens[None]))[0, places]

        with dtype_promotion():
            return score_prompts(Head(score), chunks, history, pieces)

    def _run(
        self,
        weights: Any,
        history: Int[Array, "slots S"],
        rows: Rows,
        pieces: Pieces,
        columns: Int[Array, " R"],
        *,
        length: int,
        num_columns: int,
    ) -> tuple[Int[Array, "slots S"], Chosen]:
        """Returns history and new tokens, in `columns` of the results."""
        vocab_size = self._model.config.vocab_size

        def read(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            tokens, places = inputs
            logits = self._model.score(weights, pin_rows(tokens))
            numbers = jnp.arange(len(places))[:, None]
            return logits[numbers, places].astype(jnp.float32)

        with dtype_promotion():
            tokens, places = _lay_texts(history[pieces.slots, :length], pieces)
        at_once = _rows_at_once(len(places), length * vocab_size * 4)
        groups = (x.reshape(-1, at_once, x.shape[1]) for x in (tokens, places))
        scores = jax.lax.map(read, tuple(groups))
        scores = scores.reshape(*places.shape, vocab_size)
        scores = jnp.swapaxes(scores, 0, 1).reshape(-1, vocab_size)

        def place(x: jax.Array) -> jax.Array:
            empty = jnp.zeros((x.shape[0], num_columns, *x.shape[2:]), x.dtype)
            return pin_everywhere(empty.at[:, columns].set(x, mode="drop"))

        with dtype_promotion():
            history, chosen = choose(scores, history, rows, [pieces])
            return history, jax.tree.map(place, chosen)


def _join(pieces: Sequence[Pieces]) -> Pieces:
    """Joins pieces of the host; chunks of prompts have no drafts, as lanes beside."""
    fields = zip(*(piece[:5] for piece in pieces), strict=True)
    return Pieces(*map(np.concatenate, fields))


def _lay_texts(
    tokens: Int[Array, "R L"], pieces: Pieces
) -> tuple[Int[Array, "R L"], Int[Array, "R T"]]:
    """Adds drafts to texts; returns the places behind which a token is chosen."""
    numbers = jnp.arange(pieces.num_drafts + 1, dtype=jnp.int32)[None]
    if not pieces.num_drafts:
        return tokens, jnp.maximum(pieces.starts + pieces.counts - 1, 0)[:, None]
    places = pieces.starts[:, None] + numbers
    rows = jnp.arange(len(places), dtype=jnp.int32)[:, None]
    tokens = tokens.at[rows, places[:, 1:]].set(pieces.drafts, mode="drop")
    return tokens, jnp.minimum(places, tokens.shape[1] - 1)


def _padded(length: int) -> int:
    """Returns the least padded length that holds a text."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def _rows_at_once(num_rows: int, row_bytes: int) -> int:
    """Returns the most rows whose logits fit, which divide a number of rows."""
    most = max(_LOGITS_BYTES // row_bytes, 1)
    return max(n for n in range(1, num_rows + 1) if num_rows % n == 0 and n <= most)


def _find_vocab_size(score: Score, weights: Any, max_length: int, name: Any) -> int:
    """Returns the size of the vocabulary, or refuses what gives no logits."""
    length = min(_SHORTEST, max_length)
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    remedy = "give logits_fn(model, tokens) -> logits [B, L, V], of any L up to "
    remedy += f"max_length={max_length}"
    try:
        found = jax.eval_shape(score, weights, tokens)
    except Exception as error:  # code of the user, which may raise anything
        problem = f"fails for tokens int32[1, {length}] ({describe_error(error)})"
        raise ConfigError(Problem("logits_fn", name, problem, remedy)) from error
    shape = getattr(found, "shape", ())
    is_float = hasattr(found, "dtype") and jnp.issubdtype(found.dtype, jnp.floating)
    if len(shape) != 3 or shape[:2] != (1, length) or not is_float:
        told = f"{found.dtype}{[*shape]}" if hasattr(found, "dtype") else type(found)
        problem = f"gives {told} for tokens int32[1, {length}]"
        raise ConfigError(Problem("logits_fn", name, problem, remedy))
    return shape[2]


def _check_causal(score: Score, weights: Any, config: schema.Model, name: Any) -> None:
    """Refuses logits that depend on later tokens, which padding would change."""
    length = min(_SHORTEST, config.max_length)
    row = np.arange(length, dtype=np.int32)[None] % config.vocab_size
    other = row.copy()
    half = length // 2
    other[:, half:] = (row[:, half:] + 1) % config.vocab_size

    @jax.jit
    def early(weights, tokens):
        return pin_everywhere(score(weights, tokens)[:, :half].astype(jnp.float32))

    first, second = (np.asarray(early(weights, x)) for x in (row, other))
    bound = _TOLERANCE * np.abs(first).max()
    if not np.allclose(first, second, rtol=0, atol=bound, equal_nan=True):
        problem = "gives logits that depend on later tokens"
        remedy = "give a causal model, whose logits at a place read the tokens up to it"
        raise ConfigError(Problem("logits_fn", name, problem, remedy))
