"""Codes of 8 or 4 bits as bfloat16, in the registers from which tensor cores read."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from zjax_kernels.decode.product.tuning import CHUNK
from zjax_kernels.sparse.mosaic_gpu.arithmetic import Arithmetic

_ONE = 0x4300
"""Bits of 128 in bfloat16, whose 7 bits of mantissa count single units."""
_CHOOSE = "lop3.b32 $0, $1, $2, $3, 0xEA;"
"""`(word & mask) | one`, which the compiler makes two instructions."""


def codes_of_words(
    arithmetic: Arithmetic, words: Array, bits: int, number: int
) -> Array:
    """Returns the `number`-th codes of words of 16 bits, the lowest bits first.

    The interpreter has codes in place of words, [m, 64 * codes of a word].
    """
    if arithmetic.simulated:
        codes = words.reshape(len(words), CHUNK, 16 // bits)[:, :, number]
        return codes.astype(jnp.bfloat16)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(words.shape, jnp.bfloat16, layout=layout)
    run = functools.partial(_widen, bits=bits, shift=bits * number)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(run)(words)


def _widen(ctx: Any, words: Any, *, bits: int, shift: int) -> Any:
    """Widens codes in registers of two words."""
    del ctx
    found = np.empty(words.registers.shape, dtype=object)
    for place, register in np.ndenumerate(words.registers):
        found[place] = _widen_pair(register, bits, shift)
    return mgpu.FragmentedArray(_registers=found, _layout=words.layout, _is_signed=None)


def _widen_pair(register: Any, bits: int, shift: int) -> Any:
    """Widens a code of each of two words.

    Bits of a code become the mantissa of a number of 128 or more, from which the excess
    is subtracted: three instructions, where a conversion takes twice as many, and lanes
    exchange nothing.
    """
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    single = ir.VectorType.get((1,), i32)

    def number(value: int) -> Any:
        return arith.constant(i32, ir.IntegerAttr.get(i32, value))

    def twice(value: int) -> Any:
        return number(value << 16 | value)

    def as_floats(x: Any) -> Any:
        return vector.bitcast(pair, vector.broadcast(single, x))

    word = vector.extract(vector.bitcast(single, register), [], [0])
    if bits == 4:  # counted from -8 on: once for the four codes of a word
        word = arith.xori(word, twice(0x8888))
    if shift:
        word = arith.shrui(word, number(shift))

    def choose(mask: int) -> Any:
        given = [word, twice(mask), twice(_ONE)]
        found = llvm.inline_asm(i32, given, _CHOOSE, "=r,r,r,r", has_side_effects=False)
        return as_floats(found)

    if bits == 4:
        return arith.subf(choose(0xF), as_floats(twice(_ONE + 8)))
    # Bit 7 is worth -128, and makes the exponent of 128 that of 256.
    return arith.subf(choose(0x7F), choose(0x80))
