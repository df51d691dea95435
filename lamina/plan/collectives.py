"""Predicts the time of an all-reduce between devices of one machine: NCCL's ring, and vLLM's own kernel over NVLink."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lamina.plan.gemm import Floats

CUSTOM_BYTES, CUSTOM_DEVICES = 8 * 2**20, 8
"""vLLM leaves all-reduces of fewer bytes to its own kernel, on up to so many devices: its defaults, as on the A100 that
was measured. On Hopper, another kernel takes over from smaller sizes on, which was not."""


@dataclass(frozen=True, kw_only=True)
class RingFit:
    """NCCL's ring, whose volume is 2 (n - 1) / n of the bytes:

        latency_s + (n - 1) hop_s + volume / (link_share link (2 / n)^sharing) + ramp_s (1 - exp(-volume / ramp_bytes))

    Attributes:
        sharing: 0 where every device has a link of its own (NVLink), more where all cross one bus (PCIe).
        ramp_s, ramp_bytes: what a long transfer loses to the protocol of long transfers, and from what volume on.
    """

    latency_s: float
    hop_s: float
    link_share: float
    ramp_s: float
    ramp_bytes: float
    sharing: float

    def seconds(self, nbytes: ArrayLike, devices: int, link_bytes_s: float) -> Floats:
        """Seconds of summing ``nbytes`` over ``devices``."""
        volume = 2 * (devices - 1) / devices * np.asarray(nbytes, dtype=np.float64)
        rate = self.link_share * link_bytes_s * (2 / devices) ** self.sharing
        ramp = self.ramp_s * (1 - np.exp(-volume / self.ramp_bytes))
        return np.asarray(self.latency_s + (devices - 1) * self.hop_s + volume / rate + ramp)


@dataclass(frozen=True, kw_only=True)
class PeerReadFit:
    """vLLM's kernel: every device reads all others' data at once, or, in two phases, a share each:

        latency_s + (n - 1) hop_s + min((n - 1) bytes / rate, 2 (n - 1) / n bytes / rate + phase_s)

    with rate = link_share link, and phase_s the synchronisation between the phases.
    """

    latency_s: float
    hop_s: float
    link_share: float
    phase_s: float

    def seconds(self, nbytes: ArrayLike, devices: int, link_bytes_s: float) -> Floats:
        """Seconds of summing ``nbytes`` over ``devices``; infinite where vLLM does not use this kernel."""
        sizes, rate = np.asarray(nbytes, dtype=np.float64), self.link_share * link_bytes_s
        once = (devices - 1) * sizes / rate
        twice = 2 * (devices - 1) / devices * sizes / rate + self.phase_s
        found = self.latency_s + (devices - 1) * self.hop_s + np.minimum(once, twice)
        return np.where((sizes < CUSTOM_BYTES) & (devices <= CUSTOM_DEVICES), found, np.inf)
