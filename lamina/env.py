"""Every environment variable Lamina reads, in one place."""

import os
from dataclasses import dataclass

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class Environment:
    """Values of the ``LAMINA_*`` variables.

    Attributes:
        log_level: ``LAMINA_LOG_LEVEL``, the level of all processes' log lines (default WARNING).
        rdma_device: ``LAMINA_RDMA_DEVICE``, the RDMA device and port to use, as ``mlx5_0`` or ``mlx5_0:1`` (default:
            chosen by ``transport.rdma_devices``).
    """

    log_level: str = "WARNING"
    rdma_device: str = ""


def environment() -> Environment:
    """Read the variables now."""
    return Environment(
        log_level=os.environ.get("LAMINA_LOG_LEVEL", "WARNING").upper(),
        rdma_device=os.environ.get("LAMINA_RDMA_DEVICE", ""),
    )
