"""The process of a compute worker, ``python -m lamina.compute``: what must be settled before torch is imported."""

import gc
import sys

# Torch and transformers make a million objects that live as long as the process. Looking through them for garbage
# while there are ever more takes a fifth of a start; the worker enables it again once it serves.
gc.disable()

# Both import these if they are installed, at half a second in all. A text decoder on a CPU uses none of them.
for package in ("PIL", "scipy", "sklearn", "triton"):
    sys.modules[package] = None  # type: ignore[assignment]

from lamina.compute.worker import main  # noqa: E402

main()
