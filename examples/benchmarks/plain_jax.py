"""Plain JAX on a GPT, ZeRO written as shardings: what zjax must not fall below.

python examples/benchmarks/plain_jax.py --stage=2 --num_layers=48 --embed_size=1600
    --num_heads=25 --vocab_size=50304 --length=1024 --microbatch_size=16
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from shape import Shape, make_parser, shape_of

INITIAL_SCALE = 0.02
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))


def init(shape: Shape, key: jax.Array) -> dict:
    width = shape.embed_size

    def matrix(number: int, *dims: int) -> jax.Array:
        return INITIAL_SCALE * jax.random.normal(jax.random.fold_in(key, number), dims)

    def linear(number: int, into: int, out: int) -> dict:
        return {"kernel": matrix(number, into, out), "bias": jnp.zeros(out)}

    def norm() -> dict:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block(layer: int) -> dict:
        return {
            "attention_norm": norm(),
            "query_key_value": linear(4 * layer, width, 3 * width),
            "output": linear(4 * layer + 1, width, width),
            "mlp_norm": norm(),
            "up": linear(4 * layer + 2, width, 4 * width),
            "down": linear(4 * layer + 3, 4 * width, width),
        }

    first = 4 * shape.num_layers
    return {
        "tokens": matrix(first, shape.vocab_size, width),
        "positions": matrix(first + 1, shape.length, width),
        "blocks": [block(layer) for layer in range(shape.num_layers)],
        "norm": norm(),
    }


def apply_norm(x: jax.Array, params: dict) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return (scaled * params["scale"] + params["bias"]).astype(x.dtype)


def apply_linear(x: jax.Array, params: dict) -> jax.Array:
    return x @ params["kernel"] + params["bias"]


def apply_block(x: jax.Array, params: dict, num_heads: int) -> jax.Array:
    normed = apply_norm(x, params["attention_norm"])
    heads = apply_linear(normed, params["query_key_value"])
    heads = heads.reshape(*x.shape[:2], 3, num_heads, -1)
    query, key, value = jnp.moveaxis(heads, 2, 0)
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    mixed = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=kernel
    )
    x = x + apply_linear(mixed.reshape(x.shape), params["output"])
    hidden = jax.nn.gelu(apply_linear(apply_norm(x, params["mlp_norm"]), params["up"]))
    return x + apply_linear(hidden, params["down"])


def loss_of(params: dict, tokens: jax.Array, num_heads: int) -> jax.Array:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["tokens"][inputs] + params["positions"][: inputs.shape[1]]
    for block in params["blocks"]:
        x = apply_block(x, block, num_heads)
    logits = (apply_norm(x, params["norm"]) @ params["tokens"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def sharding_of(mesh: Mesh, array: jax.ShapeDtypeStruct) -> NamedSharding:
    """Splits the longest dimension that divides over all devices, if there is one."""
    dims = [i for i, length in enumerate(array.shape) if length % mesh.size == 0]
    spec: list[str | None] = [None] * array.ndim
    if dims:
        spec[max(dims, key=lambda i: array.shape[i])] = "data"
    return NamedSharding(mesh, PartitionSpec(*spec))


def make_step(shape: Shape, stage: int, mesh: Mesh, places: tuple):
    """ZeRO as placements; stages 1 and 2 are one program without accumulation."""
    split = places[0]
    whole = NamedSharding(mesh, PartitionSpec())

    def step(state: tuple, tokens: jax.Array) -> tuple:
        master, moments = state
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), master)
        half = jax.lax.with_sharding_constraint(half, split)
        if stage < 3:
            # The barrier keeps the cast ahead of the gather, which then sends half.
            half = jax.lax.optimization_barrier(half)
            half = jax.lax.with_sharding_constraint(half, whole)
        loss, gradients = jax.value_and_grad(loss_of)(half, tokens, shape.num_heads)
        gradients = jax.lax.with_sharding_constraint(gradients, split)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        updates, moments = OPTIMIZER.update(gradients, moments, master)
        return (optax.apply_updates(master, updates), moments), loss

    return jax.jit(step, donate_argnums=0, out_shardings=(places, None))


def main() -> None:
    parser = make_parser("Plain JAX on a GPT")
    parser.add_argument("--stage", type=int, choices=(2, 3), required=True)
    given = parser.parse_args()
    shape = shape_of(given)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def fresh(key: jax.Array) -> tuple:
        master = init(shape, key)
        return master, OPTIMIZER.init(master)

    key = jax.random.key(0)
    place = functools.partial(sharding_of, mesh)
    places = jax.tree.map(place, jax.eval_shape(fresh, key))
    state = jax.jit(fresh, out_shardings=places)(key)
    assert sum(x.size for x in jax.tree.leaves(state[0])) == shape.num_params
    size = (shape.microbatch_size * mesh.size, shape.length + 1)
    tokens = np.random.default_rng(0).integers(shape.vocab_size, size=size)
    batch = jax.device_put(
        tokens.astype(np.int32), NamedSharding(mesh, PartitionSpec("data"))
    )
    program = make_step(shape, given.stage, mesh, places)

    def step() -> jax.Array:
        nonlocal state
        state, loss = program(state, batch)
        return loss

    def settle(loss: jax.Array) -> float:
        return float(jax.block_until_ready((loss, state))[0])

    seconds, losses = timing.time_steps(step, settle)
    stats = [device.memory_stats() or {} for device in jax.devices()]
    timing.print_result(
        shape,
        seconds,
        losses,
        device=jax.devices()[0].device_kind,
        num_devices=mesh.size,
        peak_bytes=max(each.get("peak_bytes_in_use", 0) for each in stats) or None,
        packages=("jax", "jaxlib", "optax"),
    )


if __name__ == "__main__":
    main()
