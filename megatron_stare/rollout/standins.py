"""What lets SGLang start on a machine without a GPU.

SGLang imports `triton`, `torchvision` and `sgl_kernel` while it loads, whatever
the device. None of them is needed to serve a text model on a CPU, and none has a
CPU wheel for every torch. So:

- `triton` and `torchvision` become fakes whose attributes exist and do nothing.
  They are made when first imported, and only if no real package is found.
- `sgl_kernel` becomes `sgl_kernel_cpu.py`: the few functions that the CPU path
  does call, in plain torch.

The finder is the last one asked, so a real package always wins. Nothing of
SGLang itself is changed, except by `allow_seeded_sampling` and `skip_garbage_collection`,
which say what and why.
This module imports nothing but the standard library until a stand-in is used.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

FAKED = ("triton", "torchvision")
KERNELS = "sgl_kernel"


class _FakeType(type):
    """Metaclass of faked classes: usable in annotations, isinstance() is always false."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __instancecheck__(cls, instance: object) -> bool:
        return False


class _FakeModule(types.ModuleType):
    """A module in which every name exists: as a class if capitalised, else as a decorator-like module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # a package, so that submodules are asked of the finder
        self.__file__ = __file__  # inspect and torch look at it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        value: Any = _FakeModule(full)
        if name[0].isupper() and not name.isupper():
            value = _FakeType(name, (), {"__module__": self.__name__, "__init__": lambda self, *a, **k: None})
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Decorators: `@jit` returns the function, `@autotune(...)` a decorator that does."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __getitem__(self, key: Any) -> _FakeModule:
        return self

    def __or__(self, other: Any) -> _FakeModule:  # annotations such as `triton.Config | None`
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __contains__(self, item: Any) -> bool:
        return False


class StandInFinder(MetaPathFinder, Loader):
    """Answers for the stand-ins; to be appended to `sys.meta_path`, so that it is asked last."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        top = fullname.split(".")[0]
        if top in FAKED or fullname == KERNELS:
            return ModuleSpec(fullname, self, is_package=top in FAKED)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        if spec.name == KERNELS:
            return importlib.import_module("megatron_stare.rollout.sgl_kernel_cpu")
        return _FakeModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        # SGLang and torch read versions and use triton's two integer helpers at import time.
        if module.__name__ == "triton":
            module.__version__ = "3.7.0"
            module.cdiv = lambda a, b: -(a // -b)
            module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
        elif module.__name__ == "torchvision":
            module.__version__ = "0.0.0"


def install() -> None:
    """Make the stand-ins importable in this process. Idempotent; real packages keep precedence."""
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        sys.meta_path.append(StandInFinder())


def allow_seeded_sampling() -> None:
    """Let `--enable-deterministic-inference` (per-request seeds) start on a CPU.

    SGLang accepts it only with attention backends that exist on GPUs and then
    replaces matrix products by batch-invariant triton kernels; here they are
    replaced by those of `batch_invariant.py`, and attention by the exact one of
    `cpu_attention.py`.
    """
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    package = importlib.import_module("sglang.srt.batch_invariant_ops")
    kernels = importlib.import_module("sglang.srt.batch_invariant_ops.batch_invariant_ops")
    from megatron_stare.rollout.batch_invariant import enable

    package.enable_batch_invariant_mode = kernels.enable_batch_invariant_mode = enable


def skip_garbage_collection() -> None:
    """Let a flush of the cache flush the cache only.

    On a CPU SGLang also has Python collect all garbage, which takes half a second of every weight update;
    there is no device memory to give back.
    """
    from sglang.srt.platforms.cpu import CpuDeviceMixin

    CpuDeviceMixin.empty_cache = lambda self: None
