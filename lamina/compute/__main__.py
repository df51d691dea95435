"""The process of a compute worker: ``python -m lamina.compute``."""

from lamina.compute.quick_start import before_imports, end_process
from lamina.worker.process import read_bootstrap

bootstrap = read_bootstrap()
before_imports(bootstrap.device)

from lamina.compute.worker import main  # noqa: E402

try:
    main(bootstrap)
except SystemExit:  # its reason has been reported
    end_process(1)
end_process(0)
