"""The process of a compute worker: ``python -m lamina.compute``."""

from lamina.compute.quick_start import before_imports

before_imports()

from lamina.compute.worker import main  # noqa: E402

main()
