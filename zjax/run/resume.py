"""Picks the step to resume from, and compares settings and code with the saved run."""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.extend import core

from zjax.checkpoint.store import Store
from zjax.data.tokenizer_files import KEY as TOKENIZER
from zjax.data.tokenizer_files import TokenizerRecord
from zjax.errors import CheckpointError, DataError, Problem
from zjax.jaxprs.versions import is_program
from zjax.optim.precision import cast_floating
from zjax.schedule.exchange import make_exchanges
from zjax.schedule.pacing import make_pacing, used_pacings
from zjax.settings.choices import names, sections
from zjax.settings.convert import current
from zjax.settings.derived import is_derived, without_unused
from zjax.settings.describe import ABSENT, Difference, differences
from zjax.settings.mappings import to_mapping, type_of
from zjax.settings.schema import Compressed, Config, CustomPacing, LocalSteps
from zjax.sharding.describe import describe_plan
from zjax.sharding.mesh import trace
from zjax.sharding.placement import abstract_key
from zjax.sharding.plan import Plan
from zjax.train.microbatches import cast_batch
from zjax.train.state import TrainState
from zjax.typing import Model, Params

MAX_HASHED_BYTES = 1 << 20
"""Closed-over arrays of more bytes are hashed by shape alone."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def fingerprint(function: Callable[..., Any], *args: Any) -> str:
    """Traces a function of arrays and hashes the program.

    16 hexadecimal digits, which may differ between versions of JAX.
    """
    digest = hashlib.sha256()
    for word in _hash_program(trace(function, *args)):
        digest.update(word.encode() + b"\n")
    return digest.hexdigest()[:16]


def _hash_program(program: Any) -> Iterator[str]:
    """Yields the text of a closed jaxpr, or of a kernel with unbound constants."""
    # Variables are numbered in order of use: their names differ between traces.
    numbers: dict[Any, int] = {}
    jaxpr = getattr(program, "jaxpr", program)

    def name(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            return f"{_hash_constant(atom.val)}:{atom.aval}"
        return f"{numbers.setdefault(atom, len(numbers))}:{atom.aval}"

    yield from map(_hash_constant, getattr(program, "consts", ()))
    yield " ".join(map(name, (*jaxpr.constvars, *jaxpr.invars)))
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        yield " ".join(map(name, (*equation.invars, *equation.outvars)))
        for key, value in sorted(equation.params.items()):
            yield key
            yield from _hash_param(value)
    yield " ".join(map(name, jaxpr.outvars))


def _hash_param(value: Any) -> Iterator[str]:
    """Yields the text of an equation's parameter; nested programs are hashed, too."""
    if is_program(value):
        yield from _hash_program(value)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _hash_param(entry)
    elif not callable(value):  # custom gradient rules have no stable text
        # Memory addresses differ between processes.
        yield _ADDRESS.sub("", repr(value))


def _hash_constant(value: Any) -> str:
    """Digest of a constant's dtype, shape and bytes; without bytes if large."""
    if isinstance(value, jax_core.Tracer):  # a reference to memory in a kernel
        return f"{value.aval}"
    is_key = jnp.issubdtype(getattr(value, "dtype", int), jax.dtypes.prng_key)
    data = jax.random.key_data(value) if is_key else value
    is_here = getattr(data, "is_fully_addressable", True)
    # This process cannot read all shards of an array that spans processes.
    if not is_here or getattr(data, "nbytes", 0) > MAX_HASHED_BYTES:
        return f"{data.dtype}{data.shape}"
    array = np.asarray(data)
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{array.dtype}{array.shape}{digest[:16]}"


_FUNCTION = ".function"
_ROUND = ("delay", "num_steps", "num_fragments", "num_synchronous_steps")
STARTED_FROM = {
    "checkpoint.init_from": "",
    "checkpoint.expert_noise": 0.0,
    "checkpoint.resize_vocabulary": False,
    "lora.init_from": "",
    "rl.critic.init_from": "",
}
"""Settings of the initial weights, with the values that a resumed run has."""
_NOT_COMPARED = ("checkpoint.resume",)
"""Settings that do not change results."""


def first_step(store: Store, resume: str, step: int | None = None) -> int:
    """Step of the checkpoint to start from; 0 without a checkpoint.

    `step=None` takes the newest checkpoint, as far as `resume` allows; 0 takes none.
    """
    if step is not None:
        if step:
            store.extra(step)  # raises if there is no such step
        return step
    latest = store.latest()
    directory = str(store.directory)
    if resume == "required" and latest is None:
        remedy = "give the directory of a run, or set checkpoint.resume=auto"
        problem = "holds no checkpoint to resume from"
        raise CheckpointError(Problem("directory", directory, problem, remedy))
    if resume == "never" and latest is not None:
        remedy = "choose another directory, or set checkpoint.resume=auto"
        problem = f"holds a run at step {latest}"
        raise CheckpointError(Problem("directory", directory, problem, remedy))
    return latest or 0


def check_newest(store: Store, step: int) -> None:
    """Refuses to train from a checkpoint if a later one exists."""
    latest = store.latest()
    if latest is not None and latest > step:
        problem = f"is behind step {latest}, which is saved too"
        remedy = "train from the newest, set the later ones aside (zjax rewind), or "
        remedy += "copy this one to another directory"
        raise CheckpointError(Problem("step", step, problem, remedy))


def check_tokenizer(
    saved: Mapping[str, Any], record: TokenizerRecord, config: Config
) -> None:
    """Refuses data of a tokenizer that differs from the tokenizer of a checkpoint."""
    if TOKENIZER not in saved:  # saved by an older version, or with the user's batches
        return
    before = TokenizerRecord.from_mapping(saved[TOKENIZER])
    if before.digest == record.digest:
        return
    is_prepared = config.data.source == "tokens"
    field = "data.path" if is_prepared else "data.source"
    value = config.data.path if is_prepared else config.data.source
    problem = f"has tokens of {record.name!r}, and the run was trained on those of "
    remedy = "prepare the text with the tokenizer of the run"
    raise DataError(Problem(field, value, f"{problem}{before.name!r}", remedy))


CODEC_ERRORS = "codec_errors"
"""Key of the description of errors in a checkpoint."""


def describe_errors(rows: TrainState, config: Config, step: int) -> str:
    """Returns a checksum of all settings that errors depend on.

    An error belongs to the next message of equal numbers, in equal units and at an
    equal place of the buffer; a run that sends other messages starts with errors of 0.
    """
    freeze_step, units = make_exchanges(config).freeze_step, None
    if freeze_step:
        rule, is_frozen = config.optimizer.rule, step >= freeze_step
        corrects_bias = isinstance(rule, Compressed) and rule.bias_correction
        units = rule.kind, corrects_bias, is_frozen
    settings = config.communication
    masters = jax.tree.leaves(rows.master)
    places = [(row.path, row.stored_shape, str(row.stored)) for row in masters]
    message = [
        units,
        settings.codec,
        settings.rounds.num_fragments,
        config.zero.stage,
        places,
    ]
    return hashlib.sha256(json.dumps(message).encode()).hexdigest()[:16]


def errors_fit(
    rows: TrainState, config: Config, saved: Mapping[str, Any], step: int
) -> bool:
    """Whether the error feedback of a checkpoint at `step` suits the next messages.

    `saved` is the metadata that the checkpoint keeps beside the arrays.
    """
    return saved.get(CODEC_ERRORS) == describe_errors(rows, config, step)


def describe_run(
    config: Config,
    plan: Plan,
    rows: TrainState,
    functions: Mapping[str, str],
    step: int,
) -> dict[str, Any]:
    """Metadata of a run that a checkpoint stores for the run that resumes.

    `rows` are ArrayPlans of the saved arrays, `functions` from `fingerprint_functions`.
    """
    return {
        "config": to_mapping(without_unused(config)),
        "plan": describe_plan(plan),
        "jax": jax.__version__,
        "functions": dict(functions),
        CODEC_ERRORS: describe_errors(rows, config, step),
    }


def changes(saved: Mapping[str, Any], config: Config) -> list[Difference]:
    """Lists settings, and the JAX version, that differ from a checkpoint's `extra`."""
    before = current(saved.get("config", {}))
    changed = [
        difference
        for difference in differences(before, config)
        if difference.setting not in _NOT_COMPARED
        and (difference.setting, difference.other) not in STARTED_FROM.items()
    ]
    changed += _moved_with_steps(before, config)
    if saved.get("jax") != jax.__version__:
        changed.append(Difference("jax", saved.get("jax"), jax.__version__))
    return changed


def _layer_drop_rate(config: Config) -> float:
    return config.layer_drop.rate(config.num_steps) if config.layer_drop else 0.0


_FROM_NUM_STEPS = (
    ("optimizer.rule.freeze_step", lambda config: make_exchanges(config).freeze_step),
    ("layer_drop.gamma", _layer_drop_rate),
)
"""Path and derived value of settings that follow `num_steps` if left at 0."""


def _moved_with_steps(before: Mapping[str, Any], config: Config) -> list[Difference]:
    """Lists unset values that changed because the number of steps changed."""
    num_steps = before.get("num_steps", config.num_steps)
    earlier = dataclasses.replace(config, num_steps=num_steps)
    found = []
    for path, value_in in _FROM_NUM_STEPS:
        given = _value(before, path), _value(to_mapping(config), path)
        old, new = value_in(earlier), value_in(config)
        if not any(given) and old != new:
            found.append(Difference(path, old, new))
    return found


def _value(settings: Any, path: str) -> Any:
    """Value of a setting by path in nested settings; 0 where it is absent."""
    for name in path.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings or 0


def fingerprint_functions(
    config: Config, model: Model, tx: Any = None, *, compute_dtype: Any
) -> dict[str, str]:
    """Fingerprints of the user's code, which no setting describes, by name.

    Entries `model` and `tx` exist if the functions can be traced, and one for each
    setting that names a function. The loss is traced on `model.inputs` in
    `compute_dtype`.
    """
    pacings = {
        f"{field}{_FUNCTION}": _fingerprint_pacing(pacing)
        for field, pacing in used_pacings(config)
        if isinstance(pacing, CustomPacing)
    }
    if model.inputs is None and tx is None:
        return pacings
    key = abstract_key()
    params, state = jax.eval_shape(model.init, key)
    fingerprints = pacings
    if model.inputs is not None:
        used = jax.eval_shape(lambda x: cast_floating(x, compute_dtype), params)
        batch = jax.eval_shape(
            lambda x: cast_batch(x, model, compute_dtype), model.inputs
        )
        fingerprints["model"] = fingerprint(model.loss, used, state, batch, key)
    if tx is not None:
        fingerprints["tx"] = fingerprint(
            functools.partial(_init_and_update, tx), params
        )
    return fingerprints


def _fingerprint_pacing(settings: CustomPacing) -> str:
    """Hashes the values of a user's pacing."""
    pacing = make_pacing(settings)
    return hashlib.sha256(repr(pacing).encode()).hexdigest()


def _init_and_update(tx: Any, params: Params) -> Any:
    """Initialises a transformation and updates once, for tracing."""
    state = tx.init(params)
    value = jax.tree.leaves(params)[0].sum()
    # Arguments that line searches and plateau schedules of Optax read.
    extra = {"value": value, "grad": params, "value_fn": lambda _: value}
    update = optax.with_extra_args_support(tx).update
    return state, update(params, state, params, **extra)


def report_functions(saved: Mapping[str, Any], fingerprints: Mapping[str, str]) -> None:
    """Warns if the user's functions compute something other than in the saved run."""
    before = saved.get("functions", {})
    others = [
        name
        for name in before
        if fingerprints.get(name) != before[name]
        # Jaxprs differ between versions of JAX; a pacing is hashed by values.
        and (saved.get("jax") == jax.__version__ or name.endswith(_FUNCTION))
    ]
    if others and jax.process_index() == 0:
        names = " and ".join(others)
        logging.warning("%s: the computation differs from the saved run", names)


def check_messages(saved: Mapping[str, Any], config: Config, step: int) -> None:
    """Refuses changed rounds while a fragment is in flight between replicas.

    The run would merge a fragment that was not sent, or that belongs to another round.
    """
    exchanges = make_exchanges(config)
    settings = current(saved.get("config", {})).get("communication", {})
    before = settings.get("local_steps")
    merges = range(step + 1, step + exchanges.delay + 1)
    on_its_way = any(exchanges.at(merge).merged is not None for merge in merges)
    if not on_its_way or not before:
        return
    before = to_mapping(LocalSteps()) | before
    changed = [
        (f"communication.local_steps.{name}", value, before[name])
        for name in _ROUND
        if (value := getattr(config.communication.rounds, name)) != before[name]
    ]
    problem = "is not {}, with which step {} was saved, and a fragment is on its way"
    problems = [
        Problem(field, value, problem.format(old, step), f"continue with {old}")
        for field, value, old in changed
    ]
    if problems:
        raise CheckpointError(*problems)


def report_changes(saved: Mapping[str, Any], config: Config, step: int) -> None:
    """Warns on process 0 of each setting that differs from the value saved at `step`.

    Settings that the saved version of zjax did not have are only counted if at
    defaults, because defaults compute the results of the saved version.
    """
    changed = changes(saved, config)
    told = [d for d in changed if not _is_new_default(d)]
    if changed and jax.process_index() == 0:
        lines = [f"  {d.setting}: {d.value!r} -> {d.other!r}" for d in told]
        if num_new := len(changed) - len(told):
            lines.append(f"  {num_new} settings of newer versions, at their defaults")
        text = "\n".join(lines)
        logging.warning("settings that differ from step %d:\n%s", step, text)


def _is_new_default(difference: Difference) -> bool:
    """Whether a setting absent from the checkpoint has its default, or was derived."""
    section, _, name = difference.setting.rpartition(".")
    hint = type_of(section) if section else Config
    defaults = [to_mapping(one())[name] for one in sections(hint) if name in names(one)]
    is_default = any(_is_within(difference.other, x) for x in defaults)
    is_absent = difference.value is ABSENT
    return is_absent and (is_default or is_derived(difference.other))


def _is_within(value: Any, default: Any) -> bool:
    """Whether a value is the default, or a section with all settings at defaults."""
    if isinstance(value, Mapping) and isinstance(default, Mapping):
        return all(
            _is_within(x, default.get(name, ABSENT)) for name, x in value.items()
        )
    return value == default
