"""Text generation by a decoder with blocks that are stored off the devices.

Each token is one forward pass, for which the units are prefetched in turn: the devices
hold a few units, the embedding, the head and the caches. The first units of the next
pass are prefetched while a token is chosen.

Reference: ZeRO-Inference, in DeepSpeed Inference, arXiv:2207.00032.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax

from zjax.models.generate import Settings, Text, add_token, start_text, write_text
from zjax.offload.compiled import Jit
from zjax.offload.stream import Load
from zjax.offload.units import UnitStream, gathered, rows_by_part
from zjax.settings import schema
from zjax.sharding.activations import pin_rows
from zjax.sharding.plan import staged_plan
from zjax.train.state import TrainState, stored_compute
from zjax.typing import Columns, Continuation, Params


class Generation:
    """Programs of passes through an offloaded decoder, whose units come in turn.

    Args:
        continuation: Continuation of the model's stack.
        units: Prefetcher of the model's units.
        jit: `jax.jit` with compiler options.
    """

    def __init__(self, continuation: Continuation, units: UnitStream, jit: Jit):
        self.continuation, self.units = continuation, units
        self._rows = rows_by_part(units.stack, staged_plan(units.plan).compute)
        self.begin = jit(start_text, static_argnums=2)
        self.embed = jit(self._embed)
        # The cache is donated, and so is the stream in `add_tile`: both are replaced.
        self.read = jit(self._read, static_argnums=0, donate_argnums=5)
        self.add_tile = jit(self._add_tile, static_argnums=0, donate_argnums=2)
        self.choose = jit(self._choose, static_argnums=2)

    def _embed(self, params: Params, *args: Any) -> Any:
        params = gathered(params, self._rows["embed"])
        carry, context = self.continuation.embed(params, *args)
        return pin_rows(carry), context

    def _read(self, segment: int, params: Params, *args: Any) -> Any:
        """Returns stream, input of the tiles, last column; and the cache."""
        params = gathered(params, self._rows[segment, False])
        (carry, entering), cache = self.continuation.blocks[segment](params, *args)
        return jax.tree.map(pin_rows, (carry, entering, carry[:, -1:])), cache

    def _add_tile(
        self, segment: int, params: Params, carry: jax.Array, entering: jax.Array
    ) -> Any:
        """Adds the result of a tile to the stream, and returns the last column, too."""
        tiles = self.units.stack.segments[segment].tiles
        assert tiles is not None
        params = gathered(params, self._rows[segment, True])
        carry += tiles.tile(params, entering, None)
        return pin_rows(carry), pin_rows(carry[:, -1:])

    def _choose(
        self, head: Params, key: Any, settings: Settings, text: Text, *args: Any
    ) -> Text:
        last, column = args
        scores = self.continuation.score(gathered(head, self._rows["head"]), last)
        return add_token(text, scores, column, key=key, settings=settings)


class OffloadedDecoder:
    """A decoder for `zjax.generate`, whose blocks come to the devices one by one.

    Args:
        programs: Programs of the passes.
        state: State of the run; read for the parameters in use.
        config: Shape of the model.
    """

    def __init__(self, programs: Generation, state: TrainState, config: schema.Model):
        self.programs, self.units, self.config = programs, programs.units, config
        params = stored_compute(state, self.units.plan)
        self.embed, _, self.head = self.units.stack.split(params)
        self.stored = self.units.stored(params)

    def write(
        self, tokens: jax.Array, lengths: Any, key: jax.Array, settings: Settings
    ) -> jax.Array:
        """Continues prompts; see `zjax.models.generate.StoredDecoder`."""
        columns, text = self.programs.begin(tokens, lengths, settings)
        choose = functools.partial(self.programs.choose, self.head, key, settings)
        self.units.stream.prefetch(self.loads(tokens.shape[1]))
        written = write_text(self.read, choose, columns, text, tokens, _loop)
        # Drops the units of columns that are not written.
        self.units.stream.prefetch(())
        return written

    def loads(self, column: int) -> Iterator[Load]:
        """Yields the loads of all units for the pass that scores `column`."""
        names = [(column, number) for number in range(len(self.stored))]
        return self.units.loads(self.stored, names)

    def arriving(self, columns: Columns, column: int) -> Iterator[Any]:
        """Yields each unit with its parameters, and a list for what read them last."""
        # The next units come up before the token is known, as they do not depend on it.
        if column + 1 < columns.num_columns:
            self.units.stream.prefetch_more(self.loads(column + 1))
        for unit in self.units.units:
            with self.units.on_device(self.stored, column, unit) as operands:
                yield unit, *operands

    def read(self, tokens: jax.Array, columns: Columns, caches: Any) -> Any:
        """Returns the stream's last column after a pass, and the caches by block."""
        programs, column = self.programs, int(columns.first) + tokens.shape[1]
        caches = caches or [None] * len(self.units.blocks)
        carry, context = programs.embed(self.embed, tokens, columns)
        last, entering = carry, None
        for unit, params, used in self.arriving(columns, column):
            if unit.tile:
                operands = (unit.segment, params, carry, entering)
                carry, last = programs.add_tile(*operands)
            else:
                cache = caches[unit.block]
                operands = (unit.segment, params, carry, context, columns, cache)
                (carry, entering, last), caches[unit.block] = programs.read(*operands)
            used.append(last)
        return last, caches


def _loop(condition: Any, body: Any, carry: Any) -> Any:
    """Loops on the host as `jax.lax.while_loop` does on the devices."""
    while condition(carry):
        carry = body(carry)
    return carry
