"""A stand-in for the CUDA runtime API, so that Megatron-Core runs on a machine without a GPU.

Call `install()` before importing megatron. It maps the control calls of `torch.cuda` (devices,
streams, events, random states) onto the CPU; arithmetic, collectives, modules, optimizers and the
inference engine stay Megatron's own. It does nothing where CUDA is available. No file of Megatron
is touched, and nothing in the package itself imports this module: tests, tools and examples do.

Source: the entry points that Megatron-Core 0.19.2 was seen to reach on CPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
HOST_BYTES = 16 << 30

# Factories to which Megatron passes device="cuda" or a device index.
_FACTORIES = [
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
]


class _Stream:
    """A stream on a device that executes in order: everything has already happened."""

    cuda_stream = 0
    device = CPU
    priority = 0
    stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Event:
    """An event whose time is the host clock's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end.time_s - self.time_s) * 1e3


class _DeviceGuard:
    def __init__(self, device: Any = None) -> None: ...

    def __enter__(self) -> _DeviceGuard:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Generators:
    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def is_installed() -> bool:
    """Whether the stand-in is active in this process."""
    return getattr(torch.cuda, "_trace_cpu_runtime", False)


def install() -> None:
    """Makes Megatron-Core run on the CPU of this process; does nothing where CUDA is available.

    Raises:
        RuntimeError: Megatron was imported first; it binds names of `torch.cuda` at import.
    """
    if torch.cuda.is_available() or is_installed():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "cpu_runtime.install() must run before megatron is imported, which binds names of "
            "torch.cuda at import; move the call to the top of the program"
        )
    # torch.compile of Megatron's small fused functions costs minutes on a CPU and gains nothing.
    torch._dynamo.config.disable = True
    _replace_device_control()
    _replace_random_states()
    _map_cuda_devices_to_cpu()
    _alias_cuda_tensor_types()
    _even_out_all_gather()
    torch.cuda._trace_cpu_runtime = True  # type: ignore[attr-defined]


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _replace_device_control() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()
    properties = types.SimpleNamespace(
        name="cpu",
        major=8,
        minor=0,
        total_memory=HOST_BYTES,
        multi_processor_count=1,
        gcnArchName="",
    )
    replacements = {
        "Event": _Event,
        "Stream": _Stream,
        "current_device": _returning(CPU),
        "current_stream": _returning(stream),
        "default_stream": _returning(stream),
        "device": _DeviceGuard,
        "device_count": _returning(1),
        "empty_cache": _returning(None),
        "get_device_capability": _returning((8, 0)),
        "get_device_name": _returning("cpu"),
        "get_device_properties": _returning(properties),
        "is_current_stream_capturing": _returning(False),
        "max_memory_allocated": _returning(0),
        "max_memory_reserved": _returning(0),
        "mem_get_info": _returning((HOST_BYTES // 2, HOST_BYTES)),
        "memory_allocated": _returning(0),
        "memory_reserved": _returning(0),
        "memory_stats": _returning(defaultdict(int)),
        "reset_peak_memory_stats": _returning(None),
        "set_device": _returning(None),
        "stream": _null_context,
        "synchronize": _returning(None),
        "_lazy_init": _returning(None),
        "_lazy_call": lambda callback, **_: callback(),
    }
    for name, replacement in replacements.items():
        setattr(cuda, name, replacement)
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _returning(None))
    cuda.nvtx.range = _null_context
    for owner, name in (
        (torch.Tensor, "cuda"),
        (torch.nn.Module, "cuda"),
        (torch.Tensor, "pin_memory"),
    ):
        setattr(owner, name, lambda self, *_, **__: self)
    torch.Tensor.record_stream = _returning(None)  # type: ignore[method-assign]


def _replace_random_states() -> None:
    """The CUDA generator becomes the CPU's, so Megatron's tracker really forks it."""
    cuda: Any = torch.cuda

    def get_state(device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    cuda.manual_seed = cuda.manual_seed_all = seed
    cuda.get_rng_state = cuda.random.get_rng_state = get_state
    cuda.set_rng_state = cuda.random.set_rng_state = set_state
    cuda.default_generators = _Generators()


def _map_cuda_devices_to_cpu() -> None:
    # `with torch.device(...)` knows factories by identity, and is asked for those below ours.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    original_to = torch.Tensor.to

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _cpu_for(kwargs["device"])
        if args and isinstance(args[0], str | torch.device | int):
            args = (_cpu_for(args[0]), *args[1:])
        return original_to(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None:
            kwargs["device"] = _cpu_for(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _cpu_for(device: Any) -> Any:
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_cuda = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return CPU if is_index or is_cuda else device


def _alias_cuda_tensor_types() -> None:
    """Megatron's optimizer compares `Tensor.type()` with 'torch.cuda.FloatTensor' and the like."""
    original_type = torch.Tensor.type

    @functools.wraps(original_type)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if args or kwargs or not caller.startswith("megatron."):
            return result
        return result.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = tensor_type  # type: ignore[method-assign]


def _even_out_all_gather() -> None:
    """Gloo gathers equal shapes only; Megatron's ETP > 1 dispatcher gathers unequal ones."""
    original = dist.all_gather

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        equal = len({t.shape for t in tensor_list}) <= 1
        if equal or dist.get_backend(group) != "gloo":
            return original(tensor_list, tensor, group=group, async_op=async_op)
        rows = max(t.shape[0] for t in tensor_list)
        padded = tensor.new_zeros((rows, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        original(gathered, padded, group=group)
        for target, source in zip(tensor_list, gathered, strict=True):
            target.copy_(source[: target.shape[0]])
        return None

    dist.all_gather = all_gather


@contextlib.contextmanager
def _null_context(*_: Any, **__: Any) -> Iterator[None]:
    yield
