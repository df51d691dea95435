"""What a compute worker leaves out of its imports, or imports later, so that it starts faster."""

import gc
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lamina.output import quiet_imports

_UNUSED = ("PIL", "scipy", "sklearn")
_UNUSED_ON_CPU = ("triton", "torchao")

META_KERNELS = "torch._meta_registrations"
"""Torch's functions for tensors without data. Only the capture of a model calls them, but without them torch.Generator,
which draws dummy weights, is an error."""

TRANSFORMERS = "transformers"
MODELS = "transformers.models"
COMPILER = "torch._dynamo"
DISTRIBUTED_TENSORS = "torch.distributed.tensor"


class _Placeholder(ModuleType):
    """A package that is slow to import, reduced to its modules and the names given.

    Its modules are imported as ever. It becomes the real package, with these modules, once another name is asked for.
    """

    def __init__(self, package: str, folders: list[str], **names: Any) -> None:
        """``folders``: where the package's modules are."""
        super().__init__(package)
        self.__path__ = folders
        self._is_real = False
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = f"{self.__name__}.{name}"
        if importlib.util.find_spec(module) is not None:
            return importlib.import_module(module)
        if sys.modules[self.__name__] is self:
            if self._is_real:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            self._is_real = True
            modules = {each: found for each, found in vars(self).items() if isinstance(found, ModuleType)}
            names = vars(importlib.reload(self))  # of this module, or another one that the package sets in its place
            names.update(modules | names)
        return getattr(sys.modules[self.__name__], name)


def before_imports(device: str) -> None:
    """Make the import of torch and transformers cheaper. Call it before either is imported.

    Hides installed packages that a text decoder on ``device`` never uses, whose import takes half a second, and on CPUs
    ``META_KERNELS``, a fifth of torch's import. Disables garbage collection until the worker is set up: scanning the
    libraries' million objects takes a fifth of the start. Lists no names of ``TRANSFORMERS`` and ``MODELS``, for which
    these read all 1,600 files of transformers' models.
    """
    gc.disable()
    for package in (*_UNUSED, *(_UNUSED_ON_CPU if device == "cpu" else ())):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # None makes an import fail
    if device == "cpu":
        sys.modules.setdefault(META_KERNELS, ModuleType(META_KERNELS))
    spec = importlib.util.find_spec(TRANSFORMERS)
    if spec is not None and TRANSFORMERS not in sys.modules:
        folders = list(spec.submodule_search_locations or ())
        version = importlib.metadata.version(TRANSFORMERS)
        sys.modules[TRANSFORMERS] = _Placeholder(TRANSFORMERS, folders, __version__=version, __spec__=spec)
        sys.modules[MODELS] = _Placeholder(MODELS, [f"{folder}/models" for folder in folders])
    quiet_imports()


def import_meta_kernels() -> None:
    """Import ``META_KERNELS`` if ``before_imports`` has left them out. Call it before transformers is imported."""
    if not hasattr(sys.modules[META_KERNELS], "__file__"):
        del sys.modules[META_KERNELS]
        importlib.import_module(META_KERNELS)


def import_transformers() -> None:
    """Import transformers and what captures a model, after ``before_imports`` without parts that are not used.

    On a CPU, these are the compiler of torch, whose decorators then do nothing, and tensors that are distributed over
    processes. Without ``before_imports``, nothing is left out.
    """
    if isinstance(sys.modules.get(TRANSFORMERS), _Placeholder):
        utils: Any = importlib.import_module("transformers.utils")
        # The function that this replaces would import transformers a second time, with all its names.
        utils.direct_transformers_import = lambda *_: sys.modules[TRANSFORMERS]
    if not hasattr(sys.modules[META_KERNELS], "__file__"):
        import_meta_kernels()
        if COMPILER not in sys.modules and DISTRIBUTED_TENSORS not in sys.modules:
            _leave_out_parts_of_torch(sys.modules["torch"])
    importlib.import_module("transformers.modeling_utils")


def _leave_out_parts_of_torch(torch: Any) -> None:
    (folder,) = torch.__path__
    marks = {name: _unmarked for name in ("allow_in_graph", "assume_constant_result", "disable")}
    sys.modules[COMPILER] = _Placeholder(COMPILER, [f"{folder}/_dynamo"], **marks)
    # torch compares each tensor's type with this one
    tensors = _Placeholder(DISTRIBUTED_TENSORS, [f"{folder}/distributed/tensor"], DTensor=type("DTensor", (), {}))
    sys.modules[DISTRIBUTED_TENSORS] = torch.distributed.tensor = tensors
    for module in ("transformers.utils.import_utils", "transformers.utils"):
        utils: Any = importlib.import_module(module)
        utils.is_torch_distributed_available = lambda: False
    symbols: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    symbols.uninteresting_files = frozenset  # would import the compiler to leave its files out of messages


def _unmarked(function: Callable[..., Any] | None = None, recursive: bool = True, **_: Any) -> Callable[..., Any]:
    """Return a function, or a decorator of functions, without a mark for the compiler."""
    return _unmarked if function is None else function
