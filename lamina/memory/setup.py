"""How a worker with a slab begins, and what it tells the engine of its use."""

import contextlib
import time

from lamina.errors import ConfigError
from lamina.memory.store import KvStore
from lamina.memory.tier import Tier, open_tier
from lamina.protocol.control import ControlClient, expect
from lamina.protocol.messages import USAGE_S, MemorySetup, SlabReady, SlabUsage, Stored


def make_store(control: ControlClient, resources: contextlib.ExitStack) -> tuple[KvStore, Tier | None, MemorySetup]:
    """Make the slab that the engine's next message describes, with its disk if it is to have one, which ``resources``
    closes, and report them. Raises ConfigError, WorkerError."""
    setup = expect(control, MemorySetup)
    try:
        store = KvStore(
            control.name,
            setup.attentions,
            setup.dtype,
            setup.capacity,
            setup.threads,
            setup.overlap,
            setup.kv_cache_dtype,
            control.device,
            setup.head_shards,
            setup.ranks,
            setup.forgets,
        )
    except MemoryError as error:  # CuPy's is one too
        lower = "kv_cache_memory_bytes" + (" or gpu_memory_utilization" if control.device != "cpu" else "")
        raise ConfigError(
            f"{control.device} has too little memory for the KV of {setup.capacity} tokens: {error}. Lower {lower}"
        ) from error
    tier = open_tier(store, setup.spill_dir, setup.overcommit, lambda *done: control.send(Stored(*done)), resources)
    control.send(SlabReady())
    return store, tier, setup


class UsageReports:
    """Tells the engine now and then how much of a slab is in use, and at once when nothing is any more."""

    def __init__(self, control: ControlClient, store: KvStore) -> None:
        self._control, self._store = control, store
        self._last = SlabUsage(0, 0)
        self._sent_at = 0.0
        self._repeated = True  # the last two were equal

    def tell(self, busy_s: float = 0.0) -> None:
        """Send a report if one is due. ``busy_s``: see ``SlabUsage``."""
        now = time.monotonic()
        emptied = self._last.sequences > 0 and self._store.sequences == 0
        if not emptied and now - self._sent_at < USAGE_S:
            return
        usage = SlabUsage(self._store.used_tokens, self._store.sequences, busy_s)
        repeats = usage == self._last
        if not (repeats and self._repeated):
            self._control.send(usage)
        self._last, self._repeated, self._sent_at = usage, repeats, now
