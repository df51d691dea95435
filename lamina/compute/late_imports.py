"""What a compute worker leaves out of its imports, or imports later, so that it starts faster."""

import gc
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from lamina.output import quiet_imports

_UNUSED = ("PIL", "scipy", "sklearn")
_UNUSED_ON_CPU = ("triton", "torchao")

META_KERNELS = "torch._meta_registrations"
"""Torch's functions for tensors without data. Only the capture of a model calls them, but without them torch.Generator,
which draws dummy weights, is an error."""

MODELS = "transformers.models"


class _Models(ModuleType):
    """Package ``MODELS`` without names: to list them, the real one reads all 1,600 files of its models.

    Its modules are imported as ever. The real package is imported for whoever asks for another name.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(MODELS) is self:
            del sys.modules[MODELS]
        return getattr(importlib.import_module(MODELS), name)


def before_imports(device: str) -> None:
    """Make the import of torch and transformers cheaper. Call it before either is imported.

    Hides installed packages that a text decoder on ``device`` never uses, whose import takes half a second, and on CPUs
    ``META_KERNELS``, a fifth of torch's import. Disables garbage collection until the worker is set up: scanning the
    libraries' million objects takes a fifth of the start. Lists no names of ``MODELS``.
    """
    gc.disable()
    for package in (*_UNUSED, *(_UNUSED_ON_CPU if device == "cpu" else ())):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # None makes an import fail
    if device == "cpu":
        sys.modules.setdefault(META_KERNELS, ModuleType(META_KERNELS))
    transformers = importlib.util.find_spec("transformers")
    if transformers is not None and MODELS not in sys.modules:
        models = sys.modules[MODELS] = _Models(MODELS)
        models.__path__ = [f"{folder}/models" for folder in transformers.submodule_search_locations or ()]
    quiet_imports()


def import_meta_kernels() -> None:
    """Import ``META_KERNELS`` if ``before_imports`` has left them out. Call it before transformers is imported."""
    if not hasattr(sys.modules[META_KERNELS], "__file__"):
        del sys.modules[META_KERNELS]
        importlib.import_module(META_KERNELS)
