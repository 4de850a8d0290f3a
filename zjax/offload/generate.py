"""Text generation by a decoder with blocks that are stored off the devices.

Each token is one forward pass, for which the units are prefetched in turn: the devices
hold a few units, the embedding, the head and the caches. The first units of the next
pass are prefetched while a token is chosen.

Reference: ZeRO-Inference, in DeepSpeed Inference, arXiv:2207.00032.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from zjax.models.generate import Settings, Text, add_token, make_settings, start_text
from zjax.offload.compiled import Jit
from zjax.offload.stream import Load
from zjax.offload.units import UnitStream, gathered, rows_by_part
from zjax.sharding.program_plan import staged_plan
from zjax.train.state import TrainState, stored_compute
from zjax.typing import Columns, Continuation, Params


class Generation:
    """`generate(state, tokens, ...)` of `zjax.generate`, for offloaded models.

    Args:
        continuation: Continuation of the model's stack.
        units: Prefetcher of the model's units.
        jit: `jax.jit` with compiler options.
    """

    def __init__(self, continuation: Continuation, units: UnitStream, jit: Jit):
        self.continuation, self.units = continuation, units
        self._rows = rows_by_part(units.stack, staged_plan(units.plan).compute)
        self.begin = jit(self._begin, static_argnums=2)
        self.embed = jit(self._embed)
        # The cache is donated, and so is the stream in `add_tile`: both are replaced.
        self.read = jit(self._read, static_argnums=0, donate_argnums=5)
        self.add_tile = jit(self._add_tile, static_argnums=0, donate_argnums=2)
        self.choose = jit(self._choose, static_argnums=5)

    def __call__(
        self,
        state: TrainState,
        tokens: Int[Array, "B L"] | Int[np.ndarray, "B L"],
        *,
        lengths: Int[Array, " B"] | None = None,
        key: jax.Array | None = None,
        **settings: Any,
    ) -> Int[Array, "B total"]:
        """Continues prompts; returns int32[B, L + max_new_tokens].

        Prompts of unequal length are padded on the left; `lengths` counts tokens
        without padding. `key` is needed above temperature 0, and `settings` are
        arguments of `zjax.generate`.
        """
        chosen = make_settings(**settings)
        self.continuation.check(tokens, lengths, chosen, key)
        tokens = jnp.asarray(tokens, jnp.int32)
        key = jax.random.key(0) if key is None else key
        return _Writing(self, state, tokens, lengths, key, chosen).write()

    def _begin(self, tokens: Any, lengths: Any, settings: Settings) -> Any:
        columns, text = start_text(tokens, lengths, settings)
        return self._constrained((columns.starts, text))

    def _embed(self, params: Params, *args: Any) -> Any:
        params = gathered(params, self._rows["embed"])
        carry, context = self.continuation.embed(params, *args)
        return self._constrained(carry), context

    def _read(self, segment: int, params: Params, *args: Any) -> Any:
        """Returns stream, input of the tiles, last column; and the cache."""
        params = gathered(params, self._rows[segment, False])
        (carry, entering), cache = self.continuation.blocks[segment](params, *args)
        return self._constrained((carry, entering, carry[:, -1:])), cache

    def _add_tile(
        self, segment: int, params: Params, carry: jax.Array, entering: jax.Array
    ) -> Any:
        """Adds the result of a tile to the stream, and returns the last column, too."""
        tiles = self.units.stack.segments[segment].tiles
        assert tiles is not None
        params = gathered(params, self._rows[segment, True])
        carry += tiles.tile(params, entering, None)
        return self._constrained((carry, carry[:, -1:]))

    def _choose(self, params: Params, last: Any, text: Text, *args: Any) -> Any:
        scores = self.continuation.score(gathered(params, self._rows["head"]), last)
        text = self._constrained(add_token(text, scores, *args))
        return text, text.ended.all()

    def _constrained(self, tree: Any) -> Any:
        """Shards arrays as the batch is; replicates if rows do not divide."""
        plan = self.units.plan

        def constrained(x: jax.Array) -> jax.Array:
            divides = x.shape[0] % plan.num_batch_shares == 0
            sharding = plan.batch_sharding(x) if divides else plan.replicated
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(constrained, tree)


class _Writing:
    """One call of `Generation`: the text and the caches so far."""

    def __init__(
        self,
        programs: Generation,
        state: TrainState,
        tokens: jax.Array,
        lengths: jax.Array | None,
        key: jax.Array,
        settings: Settings,
    ):
        self.programs, self.units = programs, programs.units
        self.stream = self.units.stream
        params = stored_compute(state, self.units.plan)
        self.embed, _, self.head = self.units.stack.split(params)
        self.stored = self.units.stored(params)
        self.tokens, self.key, self.settings = tokens, key, settings
        starts, self.text = programs.begin(tokens, lengths, settings)
        self.columns = Columns(starts, 0, self.text.tokens.shape[1])
        self.caches: list[Any] = [None] * len(self.units.blocks)

    def write(self) -> jax.Array:
        """Writes tokens column by column, until every row has ended."""
        length, settings = self.tokens.shape[1], self.settings
        columns = range(length, length + settings.max_new_tokens)
        self.stream.prefetch(self.loads(length))
        for column in columns:
            # Enqueue the next pass before the token is known: units do not depend on
            # the token.
            if column + 1 in columns:
                self.stream.prefetch_more(self.loads(column + 1))
            last = self.read(column)
            self.text, is_over = self.programs.choose(
                self.head, last, self.text, self.key, column, settings
            )
            if settings.end_ids and is_over:
                break
        self.stream.prefetch(())  # drops the units of columns that are not written
        return self.text.tokens

    def loads(self, column: int) -> Iterator[Load]:
        """Yields the loads of all units for the pass of `column`."""
        names = [(column, number) for number in range(len(self.stored))]
        return self.units.loads(self.stored, names)

    def read(self, column: int) -> jax.Array:
        """Returns the stream's last column, which scores the token of `column`."""
        programs, is_prompt = self.programs, column == self.tokens.shape[1]
        # The first pass reads the whole prompt, every further pass the newest token.
        tokens = self.tokens if is_prompt else self.text.new[:, None]
        columns = dataclasses.replace(self.columns, first=column - tokens.shape[1])
        carry, context = programs.embed(self.embed, tokens, columns)
        last, entering = carry, None
        for unit in self.units.units:
            with self.units.on_device(self.stored, column, unit) as (params, used):
                if unit.tile:
                    operands = (unit.segment, params, carry, entering)
                    carry, last = programs.add_tile(*operands)
                else:
                    cache = self.caches[unit.block]
                    operands = (unit.segment, params, carry, context, columns, cache)
                    (carry, entering, last), cache = programs.read(*operands)
                    self.caches[unit.block] = cache
                used.append(last)
        return last
