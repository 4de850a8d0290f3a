"""Compresses a decoder block by block: one block of weights is on the device.

Calibration rows pass through the blocks together. What enters the matrices of a block
is recorded with the block's weights as they were; the next block sees the outputs of
the rounded block. Held-out rows pass beside them, by the weights before, by weights
rounded to nearest, and by the compressed weights: one pass gives all losses.
"""

import collections
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zjax.compress.block import RoundedBlock, round_block
from zjax.compress.experts import Routed, round_experts
from zjax.compress.folding import Arrays
from zjax.compress.opened import BLOCKS, Opened
from zjax.compress.partial import PartialOutput
from zjax.compress.parts import (
    BlockParts,
    BlockPlace,
    layers_of,
    parts_of,
    places_of,
    rule_of,
)
from zjax.compress.scores import Score, Scorer
from zjax.compress.statistics import Statistics, add_tokens, empty
from zjax.errors import CheckpointError, ConfigError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.models.block import segments_of
from zjax.models.nnx import nest_named
from zjax.models.recording import (
    Recorder,
    recording_stack,
    rounding_stack,
)
from zjax.models.stack import make_stack
from zjax.settings.compress import Compress, Method, Nearest
from zjax.weights.importance import real_tokens
from zjax.weights.source import name_leaves

Batch = Mapping[str, np.ndarray]
BEFORE, NEAREST, AFTER = "before", "rounded to nearest", "after"
"""Names of the weights that held-out rows pass through."""
_DEVICE_SHARE = 0.3
"""Share of the device's memory that activations of calibration rows may take."""


class Outcome(NamedTuple):
    """What compression found."""

    scores: dict[str, Score]
    """Losses of held-out rows by name of the weights."""
    notes: list[str]
    """Matrices that were not rounded as asked, by name."""


class Walk:
    """Compresses the blocks of an opened model in turn.

    Args:
        opened: Weights by name, and the decoder with shapes alone.
        settings: Rules, method and calibration.
        calibration: Batches of the training data; not read by round to nearest.
        heldout: Batches of the validation data.
        coded: Paths of layers whose inputs are rounded if a rule says so, as the files
            have codes; None for all layers.
    """

    def __init__(
        self,
        opened: Opened,
        settings: Compress,
        calibration: Sequence[Batch],
        heldout: Sequence[Batch],
        coded: Collection[str] | None = None,
    ):
        self._opened, self._settings = opened, settings
        decoder = opened.decoder
        self._recorder = Recorder()
        self._plain = make_stack(decoder)
        self._recording = recording_stack(decoder, self._recorder)
        self._rounding = self._plain
        paths = layers_of(decoder) if coded is None else coded
        rules = {path: rule_of(settings, path) for path in paths}
        if any(rule and rule.activations != "compute" for rule in rules.values()):
            self._rounding = rounding_stack(
                decoder, lambda path: rules.get(f"{BLOCKS}/{path}")
            )
        self._calibration = calibration if settings.method.calibrates else []
        self._heldout = heldout
        self._leaders: dict[str, str] = {}
        self._streams: dict[str, list[Any]] = {}
        self._programs: dict[Any, Any] = {}

    def run(
        self, output: PartialOutput, advance: Callable[[int], None] = lambda _: None
    ) -> Outcome:
        """Compresses all blocks that the output lacks; calls `advance` for each."""
        outside, dtype = self._opened.read_outside(), self._opened.dtype
        _check_finite(name_leaves(outside), dtype)
        notes = list[str]()
        self._start(outside)
        for index, place in enumerate(places_of(self._opened.decoder)):
            params = self._read(place)
            found = output.read(index)
            if found is None:
                rounded, added = self._compress(place, params)
                changed = self._cast(rounded.params)
                _check_held(place, changed, dtype)
                output.write(index, changed, rounded.scales, added)
                found = output.read(index)
                assert found is not None
            new, added = found
            notes += added
            after = {path: jnp.asarray(x) for path, x in new.items()}
            self._pass(place, params, self._cast(after))
            advance(index)
        scores = self._score(outside)
        return Outcome(scores, notes)

    def _read(self, place: BlockPlace) -> Arrays:
        """Reads a block, and refuses weights that are not finite as they go out."""
        params = self._opened.read_block(place.name, place.number)
        # No name keeps the cast block: the device would hold it through calibration.
        _check_finite(
            {place.named(path): x for path, x in self._cast(params).items()},
            self._opened.dtype,
        )
        return params

    def _cast(self, params: Arrays) -> Arrays:
        """Casts parameters to the dtype that goes out."""
        return {path: x.astype(self._opened.dtype) for path, x in params.items()}

    def _start(self, outside: Any) -> None:
        """Embeds all rows."""
        embed = self._plain.split(outside | {"blocks": self._no_blocks()})[0]

        @jax.jit
        def run(params: Any, batch: Any) -> Any:
            return self._plain.embed(params, batch, None)

        def all_of(batches: Sequence[Batch]) -> list[Any]:
            with dtype_promotion():
                return [run(embed, dict(batch)) for batch in batches]

        calibration, heldout = all_of(self._calibration), all_of(self._heldout)
        self._contexts = {
            "calibration": [context for _, context in calibration],
            "heldout": [context for _, context in heldout],
        }
        carries = [carry for carry, _ in calibration]
        total = sum(x.nbytes for x in jax.tree.leaves(carries))
        self._is_on_host = total > _DEVICE_SHARE * _device_bytes()
        self._streams = {
            "calibration": [self._store(carry) for carry in carries],
            **{name: [carry for carry, _ in heldout] for name in self.names},
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights that held-out rows pass through."""
        if isinstance(self._settings.method, Nearest):
            return BEFORE, AFTER
        return BEFORE, NEAREST, AFTER

    def _no_blocks(self) -> Any:
        """Stands for the blocks where a stack splits parameters."""
        names = segments_of(self._opened.decoder.blocks)
        return {name: None for name in names if name}

    def _store(self, carry: Any) -> Any:
        """Moves activations of calibration rows to host memory if they need it."""
        return jax.device_get(carry) if self._is_on_host else carry

    def _pass(self, place: BlockPlace, before: Arrays, after: Arrays) -> None:
        """Passes all rows through a block, by the weights of each."""
        rows = self._streams
        run = functools.partial(self._forward, place)
        rows[BEFORE] = run(self._plain, self._cast(before), rows[BEFORE], "heldout")
        if NEAREST in rows:
            nearest = self._round(place, before, Nearest(), {}, {})[0]
            new = self._cast(nearest.params)
            rows[NEAREST] = run(self._rounding, new, rows[NEAREST], "heldout")
        rows[AFTER] = run(self._rounding, after, rows[AFTER], "heldout")
        carries = run(self._rounding, after, rows["calibration"], "calibration")
        rows["calibration"] = carries

    def _forward(
        self, place: BlockPlace, stack: Any, params: Arrays, rows: list[Any], kind: str
    ) -> list[Any]:
        """Runs a block on all batches of a kind."""
        block = stack.segments[place.segment].block

        def make() -> Any:
            @jax.jit
            def run(params: Arrays, carry: Any, context: Any) -> Any:
                return block(nest_named(params), carry, context, None)[0]

            return run

        run = self._program(("forward", stack is self._plain, place.segment), make)
        found, store = [], self._store if kind == "calibration" else lambda x: x
        for carry, context in zip(rows, self._contexts[kind], strict=True):
            with dtype_promotion():
                found.append(store(run(params, carry, context)))
        return found

    def _program(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns the program of a key, made once."""
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    def _compress(
        self, place: BlockPlace, params: Arrays
    ) -> tuple[RoundedBlock, list[str]]:
        """Rounds a block by what enters the matrices; returns notes, too."""
        found, routed = {}, {}
        if self._calibration:
            found, routed = self._record(place, self._cast(params))
        method = self._settings.method
        return self._round(place, params, method, found, routed)

    def _record(
        self, place: BlockPlace, params: Arrays
    ) -> tuple[dict[str, Statistics], dict[str, Routed]]:
        """Computes statistics of what enters the matrices of a block."""
        block, recorder = (
            self._recording.segments[place.segment].block,
            self._recorder,
        )
        prefix = f"{place.name}/" if place.name else ""

        def trace(params: Arrays, carry: Any, context: Any) -> Any:
            block(nest_named(params), carry, context, None)
            inputs, experts = recorder.take()
            names = _share(inputs, prefix)
            self._leaders = names
            kept = {names[p.removeprefix(prefix)]: x for p, x in inputs.items()}
            return kept, {p.removeprefix(prefix): x for p, x in experts.items()}

        def make() -> Any:
            @functools.partial(jax.jit, donate_argnums=3)
            def run(
                params: Arrays, carry: Any, context: Any, found: Any, mask: Any
            ) -> Any:
                inputs, experts = trace(params, carry, context)
                added = {
                    path: add_tokens(found[path], _tokens(x, mask), mask.reshape(-1))
                    for path, x in inputs.items()
                }
                return added, experts

            return run, {}

        run, memo = self._program(("record", place.segment), make)
        rows, contexts = self._streams["calibration"], self._contexts["calibration"]
        with dtype_promotion():
            if not memo:
                shapes, _ = jax.eval_shape(trace, params, rows[0], contexts[0])
                mask = real_tokens(self._calibration[0])
                memo["sizes"] = {
                    path: x.size // mask.size for path, x in shapes.items()
                }
                memo["leaders"] = self._leaders
            found = {path: empty(size) for path, size in memo["sizes"].items()}
            routed = collections.defaultdict(list)
            for carry, context, batch in zip(
                rows, contexts, self._calibration, strict=True
            ):
                mask = real_tokens(batch)
                found, experts = run(params, carry, context, found, mask)
                for path, (tokens, chosen) in experts.items():
                    routed[path].append(_routed(tokens, chosen, mask))
        joined = {
            path: Routed(*map(np.concatenate, zip(*parts, strict=True)))
            for path, parts in routed.items()
        }
        leaders = memo["leaders"]
        return {path: found[leader] for path, leader in leaders.items()}, joined

    def _round(
        self,
        place: BlockPlace,
        params: Arrays,
        method: Method,
        found: Mapping[str, Statistics],
        routed: Mapping[str, Routed],
    ) -> tuple[RoundedBlock, list[str]]:
        """Rounds the matrices and the experts of a block."""
        layers, mixtures = self._parts_of(place)
        found = {layer.path: found[layer.path] for layer in layers.layers if found}
        rounded = round_block(params, layers, method, found)
        scales, notes = dict(rounded.scales), list[str]()
        for mixture in mixtures:
            given = routed.get(mixture.path)
            least = self._settings.expert_tokens
            added, few = round_experts(rounded.params, mixture, method, given, least)
            scales |= added.scales
            rounded = RoundedBlock(added.params, scales)
            if few:
                notes.append(_describe_few(place.named(mixture.path), few, least))
        return rounded, notes

    def _parts_of(self, place: BlockPlace) -> BlockParts:
        """Lists what rules round in a block."""
        make = functools.partial(
            parts_of, self._settings, self._opened.config, self._opened.decoder, place
        )
        return self._program(("parts", place.segment), make)

    def _score(self, outside: Any) -> dict[str, Score]:
        """Computes losses and greedy tokens of held-out rows."""
        scorer = Scorer(self._opened, outside)
        expected, scores = None, {}
        for name in self.names:
            score, tokens = scorer(self._streams[name], self._heldout, expected)
            expected = tokens if expected is None else expected
            scores[name] = score
        return scores


def _check_finite(params: Mapping[str, Any], dtype: str) -> None:
    """Refuses weights that are not finite, which would reach all losses."""
    if wrong := _not_finite(params):
        problem = f"is not finite everywhere in {dtype}"
        remedy = "compress another checkpoint"
        raise CheckpointError(*(Problem("tensor", x, problem, remedy) for x in wrong))


def _check_held(place: BlockPlace, params: Arrays, dtype: str) -> None:
    """Refuses a block whose inputs are too large for the dtype of products."""
    if wrong := _not_finite(params):
        problem = f"does not hold what enters {place.named(wrong[0])}"
        remedy = "use bfloat16 or float32"
        raise ConfigError(Problem("precision.compute_dtype", dtype, problem, remedy))


def _not_finite(params: Mapping[str, Any]) -> list[str]:
    """Lists arrays that are not finite everywhere."""
    return [name for name, x in params.items() if not bool(jnp.isfinite(x).all())]


def _share(inputs: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Returns, for each layer, the first layer with equal inputs."""
    first: dict[int, str] = {}
    return {
        path.removeprefix(prefix): first.setdefault(id(x), path.removeprefix(prefix))
        for path, x in inputs.items()
    }


def _tokens(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the inputs of a layer as a row per token."""
    return x.reshape(mask.size, -1)


def _routed(tokens: Any, chosen: Any, mask: Any) -> Routed:
    """Moves the tokens of a mixture to the host, without padding."""
    tokens, chosen, mask = jax.device_get((tokens, chosen, mask))
    mask = mask.reshape(-1)
    tokens = tokens.reshape(mask.size, -1)[mask]
    return Routed(tokens, chosen.reshape(mask.size, -1)[mask].astype(np.int32))


def _describe_few(name: str, few: Mapping[int, int], least: int) -> str:
    """Names the experts of a layer that saw too few tokens."""
    listed = ", ".join(f"{number} ({count})" for number, count in few.items())
    return f"{name}: rounded to nearest, below {least} tokens: experts {listed}"


def _device_bytes() -> float:
    """Memory of the device; host memory of CPU devices counts as enough."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", float("inf"))
