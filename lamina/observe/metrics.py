"""The engine's figures in Prometheus' words, read anew at every scrape."""

import collections
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from lamina.engine.engine import Engine

__all__ = ["CONTENT_TYPE", "Metrics"]


class Metrics:
    """What is known of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """All figures as a scraper takes them, of type ``CONTENT_TYPE``."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Prometheus' interface of a collector."""
        stats = self._engine.stats()
        yield GaugeMetricFamily("lamina_up", "1 while the engine runs, 0 once it has stopped.", int(stats.dead is None))
        yield GaugeMetricFamily("lamina_requests_running", "Requests admitted and not ended.", stats.running)
        yield GaugeMetricFamily("lamina_requests_waiting", "Requests that wait to be admitted.", stats.waiting)
        yield CounterMetricFamily(
            "lamina_steps", "Steps completed, those that only release sequences included.", stats.steps
        )
        yield CounterMetricFamily(
            "lamina_sequences_moved", "Sequences that went from one memory worker to another to make room.", stats.moved
        )
        used = GaugeMetricFamily("lamina_kv_slots_used", "Token slots in use.", labels=["worker"])
        slots = GaugeMetricFamily("lamina_kv_slots", "Token slots in all.", labels=["worker"])
        for worker, memory in stats.memory.items():
            used.add_metric([worker], memory.used)
            slots.add_metric([worker], memory.capacity)
        yield from (used, slots)
        links = GaugeMetricFamily(
            "lamina_links", "Pairs of workers by the transport between them, and why.", labels=["transport", "reason"]
        )
        choices = self._engine.cluster.links.values()
        for choice, pairs in collections.Counter(choices).items():
            links.add_metric([choice.transport.value, choice.reason], pairs)
        yield links
