"""Who competes: programs of this folder, and `zjax bench`, as contestants."""

from typing import Literal

from contests import Case, Contestant
from shape import Shape

JAX_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""JAX takes three quarters of a device unless told otherwise; torch takes all."""
FOR_THIS_GPU = {"TORCH_CUDA_ARCH_LIST": ""}
"""DeepSpeed builds its extensions for the GPU that is there: `9.0a`, as some machines
have it in this variable, is a version that it cannot read."""
ONE_DEVICE = {"CUDA_VISIBLE_DEVICES": "0"}
_HERE = "examples/benchmarks"
_TORCH = ("{python}", "-m", "torch.distributed.run")
_PROCESSES = "--nproc_per_node={devices}"


def zjax(
    name: str, config: str, *settings: str, environment: dict[str, str] | None = None
) -> Contestant:
    """`zjax bench` on a config file with changed settings, such as `zero.stage=2`."""
    words = ("{python}", "-m", "zjax.cli.main", "bench", f"--config={config}")
    changes = (f"--config.{setting}" for setting in settings)
    variables = JAX_MEMORY | (environment or {})
    return Contestant(name, (*words, *changes), "zjax", variables)


def deepspeed(
    name: str,
    shape: Shape,
    stage: int,
    compiled: str,
    *more: str,
    on_one_device: bool = False,
    timeout_seconds: int = 300,
) -> Contestant:
    """DeepSpeed ZeRO; `compiled` is one of `torch_gpt.COMPILED`."""
    options = (f"--stage={stage}", f"--compile={compiled}", *more)
    processes = "--nproc_per_node=1" if on_one_device else _PROCESSES
    script = f"{_HERE}/deepspeed_peer.py"
    command = (*_TORCH, processes, script, *size_flags(shape), *options)
    variables = FOR_THIS_GPU | (ONE_DEVICE if on_one_device else {})
    return Contestant(name, command, "peer", variables, timeout_seconds)


def fsdp(name: str, shape: Shape, *more: str, reshard: bool) -> Contestant:
    """Torch FSDP2 with compiled blocks and loss."""
    options = (f"--reshard={int(reshard)}", "--compile=blocks_and_loss", *more)
    return _on_all(name, "fsdp_peer", shape, *options)


def tensor(name: str, shape: Shape, *, asynchronous: bool) -> Contestant:
    """Torch tensor parallelism over all devices, with compiled blocks."""
    options = (f"--asynchronous={int(asynchronous)}", "--compile=blocks")
    return _on_all(name, "tensor_peer", shape, *options)


def pipeline(
    name: str, shape: Shape, num_microbatches: int, compiled: str, *more: str
) -> Contestant:
    """DeepSpeed's pipeline, a stage per device with its share of the parameters."""
    options = (f"--num_microbatches={num_microbatches}", f"--compile={compiled}", *more)
    return _on_all(name, "pipeline_peer", shape, *options, environment=FOR_THIS_GPU)


def plain_jax(name: str, shape: Shape, stage: int) -> Contestant:
    """ZeRO as shardings, by hand."""
    script = ("{python}", f"{_HERE}/plain_jax.py", f"--stage={stage}")
    return Contestant(name, (*script, *size_flags(shape)), "peer", JAX_MEMORY)


def matrix_product(name: str) -> Contestant:
    """Products of large matrices on one device: what any model could reach there."""
    command = ("{python}", f"{_HERE}/matrix_product.py")
    return Contestant(name, command, "peer", ONE_DEVICE)


def on_one_device(
    name: str,
    kind: Literal["zjax", "peer"],
    script: str,
    *words: str,
    is_distributed: bool = False,
    timeout_seconds: int = 90,
) -> Contestant:
    """A program that times kernels or layers; `is_distributed` if torch starts it."""
    launcher = (*_TORCH, "--nproc_per_node=1") if is_distributed else ("{python}",)
    command = (*launcher, f"{_HERE}/{script}.py", *words)
    variables = JAX_MEMORY | FOR_THIS_GPU | ONE_DEVICE
    return Contestant(name, command, kind, variables, timeout_seconds)


def compare_speed(
    ours: tuple[str, ...],
    peer: tuple[str, ...],
    must: float | None,
    aim: float | None,
    name: str = "",
) -> tuple[Case]:
    """The one case of a row about speed, or one that has a name among others."""
    metric, unit = "tokens_per_second_per_device", "tokens/s/device"
    return (Case(ours, peer, metric, unit, must=must, aim=aim, name=name),)


def _on_all(
    name: str,
    script: str,
    shape: Shape,
    *options: str,
    environment: dict[str, str] | None = None,
) -> Contestant:
    """A program of torch with a process for each device."""
    words = (f"{_HERE}/{script}.py", *size_flags(shape), *options)
    return Contestant(name, (*_TORCH, _PROCESSES, *words), "peer", environment or {})


def size_flags(shape: Shape) -> tuple[str, ...]:
    """What `shape.make_parser` reads."""
    return tuple(f"--{name}={value}" for name, value in vars(shape).items())
