"""Builds the built-in model of a config."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from zjax.jaxprs.versions import dtype_promotion
from zjax.models import lora, qlora, rounded
from zjax.models.continuation import decoder_stack
from zjax.models.layers import MatmulDtype
from zjax.models.nnx import logical_of, nest, values_of
from zjax.models.stack import Decoder, Encoder, execution_of, make_stack
from zjax.ops import remat
from zjax.ops.divergence import FORWARD, REVERSE
from zjax.ops.keys import fold_name
from zjax.settings import distill as settings
from zjax.settings import schema
from zjax.settings.layers import layers_per_scan
from zjax.settings.mixture import describe_future
from zjax.settings.quantize import Quantize
from zjax.settings.schema import Config
from zjax.sharding.naming import path_of
from zjax.stack.forward import loss_of
from zjax.typing import ATTENTION_WINDOW, Entries, Entry, Model, Params


def make_model(config: Config) -> Model:
    """Makes the decoder or encoder of `config.model`, without weights.

    Batches are dicts of `tokens` and `targets` int32[B, L] and, optionally, `weights`
    float32[B, L], `segment_ids` and `positions` int32[B, L]; an encoder also takes
    `lengths` int32[B], a model with `num_token_types` also `token_types` int32[B, L]. A
    target of -100 is ignored. The loss is the weighted mean over tokens, the metric the
    fraction of targets that were the most likely token. A batch with `teacher`
    (`Teacher` or `StoredTeacher` of `zjax.ops.cross_entropy`, as a dict) adds to the
    loss, and to the metrics, the divergence from the teacher.

    Args:
        config: Settings; read for `model`, `lora`, `quantize`, `distill`, `precision`,
            `deterministic`, `data.length`, and whether each block runs as a separate
            program.

    Returns:
        Model as pure functions and as a stack of blocks.

    Example:
        >>> config = Config()
        >>> model = make_model(config)
        >>> params, _ = jax.eval_shape(model.init, jax.random.key(0))
        >>> params["blocks"]["attention"]["query"]["kernel"].shape
        (12, 768, 12, 64)
    """
    model = dataclasses.replace(config.model, layers_per_scan=layers_per_scan(config))
    how: dict[str, Any] = {"deterministic": config.deterministic}
    # An encoder has no such mode.
    if config.precision.batch_invariant:
        how["batch_invariant"] = True
    if config.distill:
        how["divergence"] = _divergence_of(config.distill)
        hidden = config.distill.hidden
        how["states_weight"] = hidden.weight if hidden else 0.0
        maps = config.distill.attention
        how["maps_weight"] = maps.weight if maps else 0.0
    precision, length = config.precision.matmul_dtype, config.data.length
    return _build(model, precision, length, config.lora, config.quantize, **how)


def _divergence_of(distill: schema.Distill) -> float:
    """Returns the divergence of settings, as `zjax.ops.divergence` names it."""
    match distill.divergence:
        case settings.ForwardKl():
            return FORWARD
        case settings.ReverseKl():
            return REVERSE
        case settings.JensenShannon(beta=beta):
            return beta


# One command builds the same model to plan host memory, to choose a mesh, and to run;
# runs that are compared change in turn.
@functools.lru_cache(maxsize=4)
def _build(
    model: schema.Model,
    matmul_dtype: MatmulDtype,
    length: int,
    adapters: schema.Lora | None,
    rules: Quantize | None,
    divergence: float = FORWARD,
    states_weight: float = 0.0,
    maps_weight: float = 0.0,
    **options: bool,
) -> Model:
    """Builds the model of the given shape; equal arguments share the result."""
    if note := describe_future(model):
        logging.warning(note)
    if matmul_dtype == "float8" and model.moe:
        logging.warning("float8: experts multiply in precision.compute_dtype")
    module_class = {"decoder": Decoder, "encoder": Encoder}[model.kind]
    make_module = functools.partial(
        module_class, model, matmul_dtype=matmul_dtype, **options
    )

    def make(key: jax.Array, only_block: jax.Array | None = None) -> Any:
        module = make_module(only_block=only_block, rngs=nnx.Rngs(key))
        module.head.divergence = divergence
        module.states_weight, module.maps_weight = states_weight, maps_weight
        if adapters:
            # A separate key: base weights equal the weights of a run without adapters.
            lora_key = fold_name(key, "lora")
            lora.attach(module, lora_key, settings=adapters, only_block=only_block)
        # After `attach`, which for DoRA reads the columns of the exact kernels.
        if adapters and adapters.quantize:
            qlora.quantize_kernels(module, adapters.quantize, adapters.also_train)
        if rules:
            rounded.attach(module, rules)
        return module

    # One row: shapes depend on no batch size.
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    abstract = nnx.eval_shape(lambda: make(jax.random.key(0)))
    graph, logical = nnx.graphdef(abstract), nest(logical_of(abstract))
    if adapters:
        leaves = jax.tree_util.tree_leaves_with_path(
            logical, is_leaf=lambda x: x is None or isinstance(x, tuple)
        )
        lora.check_targets((path_of(keys) for keys, _ in leaves), adapters)
    is_decoder = isinstance(abstract, Decoder)
    stack = decoder_stack(abstract) if is_decoder else make_stack(abstract)

    @dtype_promotion()
    def init(key: jax.Array, only_block: jax.Array | None = None) -> Params:
        module = make(fold_name(key, "model"), only_block)
        return nest(values_of(nnx.state(module, nnx.Param)))

    return Model(
        init=lambda key: (init(key), {}),
        loss=loss_of(stack, execution_of(abstract.config)),
        bind=lambda params, model_state: nnx.merge(graph, params),
        logical=lambda params: logical,
        inputs={"tokens": tokens, "targets": tokens},
        entries=_entries(model),
        cast=(),
        stack=stack,
        init_layer=init,
        separable=True,
        takes_layers_apart=model.layers_per_scan == 0,
        loops_over_layers=model.layers_per_scan > 0,
        keeps=remat.keeps(model.remat, remat.within_reach(model.activation_memory)),
    )


def _entries(config: schema.Model) -> Entries:
    """Describes the arrays of a batch: dims, dtypes and legal ids."""
    ids, size = functools.partial(Entry, ("B", "L"), np.integer), config.vocab_size
    optional = functools.partial(Entry, is_optional=True, may_be_negative=False)
    positions = config.max_length if isinstance(config.positions, schema.Learned) else 0
    types = config.num_token_types
    return {
        "tokens": ids(num_ids=size),
        "targets": ids(num_ids=size, may_be_ignored=True),
        "weights": optional(("B", "L")),
        "segment_ids": optional(("B", "L"), np.integer),
        "positions": ids(is_optional=True, num_ids=positions),
        **({"token_types": ids(is_optional=True, num_ids=types)} if types else {}),
        "lengths": optional(("B",), np.integer),
        f"schedule/{ATTENTION_WINDOW}": Entry((), is_optional=True),
        "teacher/hidden": Entry(("B", "L", "N"), is_optional=True),
        "teacher/head": Entry((size, "N"), is_optional=True),
        "teacher/ids": Entry(
            ("B", "L", "K"), np.integer, is_optional=True, num_ids=size
        ),
        "teacher/logprobs": Entry(("B", "L", "K1"), np.floating, is_optional=True),
        "teacher/states": Entry(("B", "L", "S", "W"), is_optional=True),
        "teacher/queries": Entry(("B", "L", "S", "H", "D"), is_optional=True),
        "teacher/keys": Entry(("B", "L", "S", "KV", "D"), is_optional=True),
        "teacher/weight": Entry((), is_optional=True),
        "teacher/temperature": Entry((), is_optional=True),
    }
