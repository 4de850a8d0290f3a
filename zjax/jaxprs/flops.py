"""FLOPs of a training step, counted in the traced program of the loss."""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from zjax.jaxprs.program import Equation, interpret, programs_in
from zjax.jaxprs.versions import Closed, mapped_axes, scan_sizes
from zjax_kernels import abstract


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of forward and backward pass, without recomputation.

    Args:
        products: FLOPs of matrix products and convolutions outside of attention.
        attention: FLOPs of attention over pairs of tokens that the model does not hide.
        all_attention: FLOPs of attention over all pairs, hidden pairs included.
    """

    products: float = 0.0
    attention: float = 0.0
    all_attention: float = 0.0

    @property
    def seen(self) -> float:
        """All FLOPs, without the pairs that a mask of the model hides."""
        return self.products + self.attention

    @property
    def full(self) -> float:
        """All FLOPs, of attention over all pairs."""
        return self.products + self.all_attention

    def __add__(self, other: "Flops") -> "Flops":
        values = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Flops(*(x + y for x, y in values))

    def __mul__(self, number: int | float) -> "Flops":
        return Flops(*(number * x for x in dataclasses.astuple(self)))


def count_flops(program: Closed, trained: Sequence[bool]) -> tuple[Flops, list[bool]]:
    """Counts the FLOPs of a program and of the gradient.

    A product of two arrays costs as much again for the gradient of each array that
    depends on trained inputs. Elementwise work, and recomputation in the backward pass,
    count 0. A scan counts each iteration, a conditional the most expensive branch, a
    loop of unknown length one iteration. A Pallas kernel counts the `cost_estimate` or,
    without one, the products in each step of the grid. Any other custom call counts 0.

    Args:
        program: Jaxpr of a loss, or of a part of one.
        trained: Whether each input is trained, or depends on trained inputs.

    Returns:
        FLOPs, and whether each output depends on trained inputs.

    Example:
        >>> import jax
        >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
        >>> program = jax.make_jaxpr(jnp.matmul)(x, w)
        >>> pairs = (False, False), (False, True), (True, True)
        >>> [count_flops(program, pair)[0].products for pair in pairs]
        [48.0, 96.0, 144.0]
    """
    count = _Count()
    outputs = count.visit(program, trained)
    return count.total, outputs


class _Count:
    """Adds up the FLOPs of the equations of a program; follows trained inputs."""

    def __init__(self) -> None:
        self.total = Flops()

    def visit(self, program: Closed, trained: Sequence[bool]) -> list[bool]:
        """Counts a program; returns which outputs depend on trained inputs."""
        return interpret(program, trained, self.rule, lambda _: False)

    def rule(self, equation: Equation, trained: list[bool]) -> list[bool]:
        """Counts an equation; returns which results depend on trained inputs."""
        name = equation.primitive.name
        if name in _PRODUCTS:
            self.total += _PRODUCTS[name](equation) * (1 + min(2, sum(trained)))
        elif name in _CONTROL:
            return _CONTROL[name](self, equation, trained)
        elif name == "stop_gradient":
            return [False]
        depends = any(trained)
        dtypes = [x.aval.dtype for x in equation.outvars]
        return [depends and jnp.issubdtype(x, jnp.inexact) for x in dtypes]

    def repeat(
        self, program: Closed, trained: Sequence[bool], number: int | float
    ) -> list[bool]:
        """Counts a program `number` times."""
        found, outputs = count_flops(program, trained)
        self.total += found * number
        return outputs

    def loop(
        self, equation: Equation, trained: list[bool], program: Closed, sizes: Any
    ) -> list[bool]:
        """Counts a loop; `sizes` are the constants, carried values and length."""
        num_consts, num_carry, length = sizes
        consts, carry = trained[:num_consts], trained[num_consts:][:num_carry]
        rest = trained[num_consts + num_carry :]
        while True:
            found, outputs = count_flops(program, [*consts, *carry, *rest])
            joined = list(map(operator.or_, carry, outputs))
            # What one iteration makes depend on trained inputs, the next one reads.
            if joined == carry:
                self.total += found * length
                return outputs
            carry = joined


def _dot(equation: Equation) -> Flops:
    contracted, _ = equation.params["dimension_numbers"]
    return _contraction(equation, contracted[0])


def _ragged_dot(equation: Equation) -> Flops:
    """FLOPs of a grouped product, in which one matrix multiplies each row."""
    dims = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = dims.dot_dimension_numbers
    # Groups of a contracted dim share it: the result has a dim of groups besides.
    groups = equation.invars[2].aval.shape[-1]
    is_contracted = dims.lhs_ragged_dimensions[0] in contracted
    return _contraction(equation, contracted) * (1 / groups if is_contracted else 1)


def _contraction(equation: Equation, dims: Sequence[int]) -> Flops:
    left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return Flops(abstract.product_flops(*result, *(left[dim] for dim in dims)))


def _convolution(equation: Equation) -> Flops:
    """FLOPs of a convolution: each output reads a window of some input channels."""
    params, kernel = equation.params, equation.invars[1].aval.shape
    outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
    sides = *equation.outvars[0].aval.shape, math.prod(kernel) // outputs
    # Zeros between the entries of a dilated input are not multiplied.
    return Flops(abstract.product_flops(*sides) / math.prod(params["lhs_dilation"]))


def _kernel(equation: Equation) -> Flops:
    """FLOPs that a kernel of ours gives."""
    flops, causal = equation.params["flops"], equation.params["causal_flops"]
    return Flops(flops) if causal is None else Flops(0.0, causal, flops)


_PRODUCTS: dict[str, Callable[[Equation], Flops]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    abstract.NAME: _kernel,
}
"""FLOPs of the forward pass of each product, by name of the primitive."""


def _scan(count: _Count, equation: Equation, trained: list[bool]) -> list[bool]:
    (program,) = programs_in(equation)
    sizes = *scan_sizes(equation), equation.params["length"]
    return count.loop(equation, trained, program, sizes)


def _while(count: _Count, equation: Equation, trained: list[bool]) -> list[bool]:
    """Counts one iteration of a loop of unknown length."""
    params = equation.params
    body, skipped = params["body_jaxpr"], params["cond_nconsts"]
    consts = params["body_nconsts"]
    sizes = consts, len(trained) - skipped - consts, 1
    return count.loop(equation, trained[skipped:], body, sizes)


def _cond(count: _Count, equation: Equation, trained: list[bool]) -> list[bool]:
    """Counts the most expensive branch."""
    found = [count_flops(branch, trained[1:]) for branch in programs_in(equation)]
    count.total += max((flops for flops, _ in found), key=lambda flops: flops.full)
    outputs = zip(*(outputs for _, outputs in found), strict=True)
    return [any(each) for each in outputs]


def _shard_map(count: _Count, equation: Equation, trained: list[bool]) -> list[bool]:
    """Counts the program of one device for each device of the mapped axes."""
    (program,), mesh = programs_in(equation), equation.params["mesh"]
    devices = math.prod(mesh.shape[axis] for axis in mapped_axes(equation))
    return count.repeat(program, trained, devices)


def _pallas(count: _Count, equation: Equation, trained: list[bool]) -> list[bool]:
    """Counts a Pallas kernel by the estimate in the call, or by the products."""
    params = equation.params
    factor = 1 + min(2, sum(trained))
    if estimate := params["cost_estimate"]:
        count.total += Flops(float(estimate.flops)) * factor
    else:
        (program,) = programs_in(equation)
        steps = math.prod(params["grid_mapping"].grid)
        untrained = [False] * len(program.jaxpr.invars)
        count.repeat(program, untrained, steps * factor)
    return [any(trained)] * len(equation.outvars)


_CONTROL: dict[str, Callable[[_Count, Equation, list[bool]], list[bool]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "pallas_call": _pallas,
}
"""Rules of equations that run other programs."""
