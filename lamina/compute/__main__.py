"""The process of a compute worker: ``python -m lamina.compute``."""

from lamina.compute.quick_start import before_imports
from lamina.protocol.process import read_bootstrap

bootstrap = read_bootstrap()
before_imports(bootstrap.device)

from lamina.compute.worker import main  # noqa: E402

main(bootstrap)
