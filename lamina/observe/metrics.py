"""Exports the metrics of engine and server in the Prometheus text format, read at every scrape."""

import os
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.multiprocess import MultiProcessCollector

from lamina.engine.runtime import Runtime
from lamina.engine.stats import EngineStats, imbalance
from lamina.observe.traffic import Traffic

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"

__all__ = ["CONTENT_TYPE", "Metrics"]


class Metrics:
    """The metrics of one engine and of the server in front of it.

    Attributes:
        traffic: of the server, which it counts.
    """

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        # Without them: a series per histogram and counter that no query needs.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        if MULTIPROCESS in os.environ:  # frontends count together, in files
            MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
            self.traffic = Traffic(CollectorRegistry())
        else:
            self.traffic = Traffic(self._registry)

    def text(self) -> bytes:
        """All metrics in the exposition format of ``CONTENT_TYPE``."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Implements Prometheus' collector interface."""
        stats = self._engine.stats()
        yield GaugeMetricFamily("lamina_up", "1 while the engine runs, 0 once it has stopped.", int(stats.dead is None))
        yield GaugeMetricFamily("lamina_requests_running", "Requests admitted and not finished.", stats.running)
        yield GaugeMetricFamily("lamina_requests_waiting", "Requests waiting to be admitted.", stats.waiting)
        yield CounterMetricFamily(
            "lamina_steps", "Steps completed, including those that only release sequences.", stats.steps
        )
        yield CounterMetricFamily(
            "lamina_sequences_moved", "Sequences moved between memory workers to make space.", stats.moved
        )
        yield CounterMetricFamily(
            "lamina_preemptions", "Requests whose KV was dropped, to be computed again later.", stats.preempted
        )
        yield CounterMetricFamily(
            "lamina_recoveries", "Times that workers were lost and the others went on.", stats.recoveries
        )
        yield CounterMetricFamily(
            "lamina_tokens_recomputed", "Tokens computed again because a worker was lost.", stats.recomputed
        )
        yield CounterMetricFamily(
            "lamina_prefix_cache_queries", "Tokens of requests looked up in the prefix cache.", stats.prefix_queries
        )
        yield CounterMetricFamily(
            "lamina_prefix_cache_hits", "Tokens found in the prefix cache, and so not computed.", stats.prefix_hits
        )
        yield CounterMetricFamily("lamina_kv_tokens_spilled", "Tokens whose KV was copied to a disk.", stats.spilled)
        yield CounterMetricFamily("lamina_kv_tokens_fetched", "Tokens whose KV came back from a disk.", stats.fetched)
        yield GaugeMetricFamily(
            "lamina_kv_imbalance",
            "Token slots in use on the fullest memory worker over the mean of all.",
            imbalance(stats.memory),
        )
        moved = CounterMetricFamily(
            "lamina_kv_moved_bytes", "KV that came from other memory workers while it was in use.", labels=["worker"]
        )
        for worker, nbytes in stats.placement.moved.items():
            moved.add_metric([worker], nbytes)
        yield moved
        used = GaugeMetricFamily("lamina_kv_slots_used", "Token slots in use by requests.", labels=["worker"])
        cached = GaugeMetricFamily(
            "lamina_kv_slots_cached", "Token slots of cached prefixes that no request uses.", labels=["worker"]
        )
        slots = GaugeMetricFamily("lamina_kv_slots", "Token slots in total.", labels=["worker"])
        for worker, memory in stats.memory.items():
            used.add_metric([worker], memory.used)
            cached.add_metric([worker], memory.cached)
            slots.add_metric([worker], memory.capacity)
        yield from (used, cached, slots)
        workers = GaugeMetricFamily(
            "lamina_workers",
            "1 for every worker; serving, or how it joins or leaves.",
            labels=["worker", "state"],
        )
        for worker, state in stats.workers.items():
            workers.add_metric([worker, state], 1)
        yield workers
        yield from self._scaling(stats)
        links = GaugeMetricFamily(
            "lamina_links",
            "Pairs of workers by transport and its reason.",
            labels=["transport", "reason"],
        )
        for choice, pairs in stats.links:
            links.add_metric([choice.transport.value, choice.reason], pairs)
        yield links

    def _scaling(self, stats: EngineStats) -> Iterator[Metric]:
        """Of the pools that scale by load."""
        load = GaugeMetricFamily("lamina_autoscale_load", "Workers that a pool's load would fill.", labels=["pool"])
        bounds = GaugeMetricFamily(
            "lamina_autoscale_bound", "The least and the most workers of a pool.", labels=["pool", "bound"]
        )
        changes = CounterMetricFamily(
            "lamina_autoscale_workers", "Workers that were added, or let go, by load.", labels=["pool", "change"]
        )
        latest = GaugeMetricFamily(
            "lamina_autoscale_latest_seconds", "When a pool's size was last decided, and why.", labels=["pool", "why"]
        )
        for pool, each in stats.scaling.items():
            load.add_metric([pool], each.load)
            bounds.add_metric([pool, "least"], each.least)
            bounds.add_metric([pool, "most"], each.most)
            changes.add_metric([pool, "added"], each.grown)
            changes.add_metric([pool, "removed"], each.shrunk)
            if each.last:
                latest.add_metric([pool, each.last], each.at)
        if stats.scaling:
            yield from (load, bounds, changes, latest)
