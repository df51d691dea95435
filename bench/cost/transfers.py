"""Times of transfers between devices of one machine, by which papers' systems send KV and queries."""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.fit_store import packaged_fit
from lamina.planning.plan.kernel_times import Floats


@dataclass(frozen=True, kw_only=True)
class TransferFit:
    """Fit of transfers to a peer in the same machine: ``latency_s + bytes / (link_share * link)``."""

    latency_s: float
    link_share: float

    def predict_transfer(self, nbytes: ArrayLike, link_bytes_s: float) -> Floats:
        """Return seconds of one transfer."""
        return self.latency_s + np.asarray(nbytes, dtype=np.float64) / (self.link_share * link_bytes_s)


def send_recv_seconds(model: CostModel, nbytes: ArrayLike) -> Floats:
    """Return seconds of a transfer from a device of ``model`` to a peer in the same machine."""
    hardware = model.hardware
    return _fit(hardware.like or hardware.kind).predict_transfer(nbytes, hardware.link_bytes_s)


@functools.cache
def _fit(kind: str) -> TransferFit:
    return TransferFit(**packaged_fit("send_recv", kind).parameters)
