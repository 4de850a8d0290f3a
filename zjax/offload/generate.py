"""Text from a decoder whose blocks rest elsewhere.

Each token takes a pass through all blocks, which come up in turn: the devices hold a
few of them, the embedding, the head and the caches. The first blocks of the next pass
are on their way while a token is chosen.

Reference: ZeRO-Inference, in DeepSpeed Inference, arXiv:2207.00032.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Int

from zjax.models.generate import Settings, Text, add_token, start_text
from zjax.offload.blocks import BlockStream
from zjax.offload.parts import Jit
from zjax.offload.units import gathered, rows_of_parts
from zjax.sharding.in_use import plan_on_device
from zjax.train.state import TrainState
from zjax.typing import Continuation, Params


class Generation:
    """`generate(state, tokens, ...)`: what `zjax.generate` does, block by block.

    Args:
        continuation: Of the model's stack.
        blocks: Brings up its blocks.
        jit: Compiles.
    """

    def __init__(self, continuation: Continuation, blocks: BlockStream, jit: Jit):
        self.continuation, self.blocks = continuation, blocks
        self.rows = rows_of_parts(blocks.stack, plan_on_device(blocks.plan).compute)
        self.begin = jit(self._begin, static_argnums=2)
        self.embed = jit(self._embed)
        self.read_prompt = jit(self._read_prompt, static_argnums=(0, 5, 6))
        self.read_token = jit(self._read_token, static_argnums=0, donate_argnums=6)
        self.add_tile = jit(self._add_tile, static_argnums=0, donate_argnums=2)
        self.choose = jit(self._choose, static_argnums=5)

    def __call__(
        self,
        state: TrainState,
        tokens: Int[Array, "B L"],
        *,
        lengths: Int[Array, " B"] | None = None,
        key: jax.Array | None = None,
        **settings: Any,
    ) -> Int[Array, "B total"]:
        """Continues prompts.

        Args:
            state: Its parameters in use are read.
            tokens: Prompts, padded on the left where they differ in length.
            lengths: Tokens of each prompt without its padding; L by default.
            key: Random key, needed above temperature 0.
            settings: Other arguments of `zjax.generate`.

        Returns:
            Prompts and continuations, int32[B, L + max_new_tokens].

        Raises:
            ConfigError: A setting out of range, or no room for the tokens.
        """
        chosen = Settings(**settings)
        self.continuation.check(tokens.shape[1], chosen, key)
        key = jax.random.key(0) if key is None else key
        return _Writing(self, state, tokens, lengths, key, chosen).write()

    def _begin(self, tokens: Any, lengths: Any, settings: Settings) -> Any:
        return self._held(start_text(tokens, lengths, settings))

    def _embed(self, params: Params, *args: Any) -> Any:
        params = gathered(params, self.rows["embed"])
        carry, context = self.continuation.embed(params, *args)
        return self._held(carry), context

    def _read_prompt(self, segment: int, params: Params, *args: Any) -> Any:
        params = gathered(params, self.rows[("block", segment)])
        read = self.continuation.blocks[segment].read_prompt
        stream, cache = read(params, *args)
        return self._after_block(*stream), cache

    def _read_token(self, segment: int, params: Params, *args: Any) -> Any:
        params = gathered(params, self.rows[("block", segment)])
        read = self.continuation.blocks[segment].read_token
        stream, cache = read(params, *args)
        return self._after_block(*stream), cache

    def _add_tile(
        self, segment: int, params: Params, carry: jax.Array, entering: jax.Array
    ) -> Any:
        tiles = self.blocks.stack.segments[segment].tiles
        assert tiles is not None
        params = gathered(params, self.rows[("tile", segment)])
        carry += tiles.tile(params, entering, None)
        return self._held((carry, carry[:, -1:]))

    def _after_block(self, carry: jax.Array, entering: Any) -> Any:
        """The stream, what tiles read, and the last column, which says that it is."""
        return self._held((carry, entering, carry[:, -1:]))

    def _choose(self, params: Params, last: Any, text: Text, *args: Any) -> Any:
        scores = self.continuation.score(gathered(params, self.rows["head"]), last)
        text = self._held(add_token(text, scores, *args))
        return text, text.ended.all()

    def _held(self, tree: Any) -> Any:
        """Rows on the devices of their share, or on all where they do not divide."""
        plan = self.blocks.plan

        def held(x: jax.Array) -> jax.Array:
            divides = x.shape[0] % plan.num_batch_shares == 0
            sharding = plan.batch_sharding(x) if divides else plan.replicated
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(held, tree)


class _Writing:
    """One text: its rows and its caches so far."""

    def __init__(
        self,
        programs: Generation,
        state: TrainState,
        tokens: jax.Array,
        lengths: jax.Array | None,
        key: jax.Array,
        settings: Settings,
    ):
        self.programs, self.blocks = programs, programs.blocks
        self.embed, _, self.head = self.blocks.stack.split(state.params)
        self.units = self.blocks.units(state.params)
        self.tokens, self.is_padded = tokens, lengths is not None
        self.key, self.settings = key, settings
        self.starts, self.text = programs.begin(tokens, lengths, settings)
        self.caches: list[Any] = [None] * len(self.blocks.units_of_block)

    def write(self) -> jax.Array:
        length, settings = self.tokens.shape[1], self.settings
        columns = range(length, length + settings.max_new_tokens)
        self.blocks.announce(self.units, self.names(length))
        for column in columns:
            if column + 1 in columns:
                self.blocks.announce_more(self.units, self.names(column + 1))
            last = self.read(column)
            self.text, is_over = self.programs.choose(
                self.head, last, self.text, self.key, column, settings
            )
            if settings.end_id >= 0 and is_over:
                break
        self.blocks.announce(self.units, ())  # gives up what nobody reads any more
        return self.text.tokens

    def names(self, column: int) -> Sequence[tuple[int, int]]:
        return [(column, number) for number in range(len(self.units))]

    def read(self, column: int) -> jax.Array:
        """The last column of the stream, before the one that is to be written."""
        programs, is_prompt = self.programs, column == self.tokens.shape[1]
        tokens = self.tokens if is_prompt else self.text.new[:, None]
        first = column - tokens.shape[1]
        room = self.settings.max_new_tokens
        carry, context = programs.embed(self.embed, tokens, self.starts, first)
        last = carry
        for number, cache in enumerate(self.caches):
            segment = self.blocks.segment_by_block[number]
            trunk, *tiles = self.blocks.units_of_block[number]
            with self.blocks.fetched(self.units, (column, trunk)) as (block, used):
                inputs = (segment, block, carry, context, self.starts)
                if is_prompt:
                    results = programs.read_prompt(*inputs, room, self.is_padded)
                else:
                    results = programs.read_token(*inputs, first, cache)
                (carry, entering, last), self.caches[number] = results
                used.append(last)
            for group in tiles:
                with self.blocks.fetched(self.units, (column, group)) as (tile, used):
                    carry, last = programs.add_tile(segment, tile, carry, entering)
                    used.append(last)
        return last
