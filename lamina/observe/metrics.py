"""Exports metrics of the engine and its server in the Prometheus text format, collected at each scrape."""

import bisect
import collections
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.multiprocess import MultiProcessCollector

from lamina.engine.stats import EngineStats, imbalance
from lamina.engine.streams import Runtime
from lamina.engine.updates import RequestUpdate

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)
FLUSH_S = 0.25
"""Time by which the metrics of a request's tokens may lag."""
REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class _Latencies(Histogram):
    """A histogram that takes many values at once: to add one takes several microseconds."""

    def observe_all(self, values: Sequence[float]) -> None:
        """Add ``values``."""
        self._sum.inc(sum(values))
        places = collections.Counter(bisect.bisect_left(self._upper_bounds, value) for value in values)
        for place, count in places.items():
            self._buckets[place].inc(count)


class Traffic:
    """Counters and latency histograms of HTTP requests, registered in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens = Counter(
            "lamina_prompt_tokens", "Prompt tokens of requests that got a first token.", registry=registry
        )
        self.generated_tokens = Counter("lamina_generated_tokens", "Tokens generated.", registry=registry)
        self.completions = Counter(
            "lamina_completions", "Completions ended, by finish reason.", ["finish_reason"], registry=registry
        )
        self.first_token = Histogram(
            "lamina_time_to_first_token_seconds",
            "Time from receiving a request to its first token.",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self.between_tokens = _Latencies(
            "lamina_time_between_tokens_seconds",
            "Time between updates of a request, divided by the tokens of one completion in them.",
            buckets=BETWEEN_TOKENS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "lamina_request_duration_seconds",
            "Time from receiving a request to its last token.",
            buckets=REQUEST_S,
            registry=registry,
        )


class Timing:
    """Measures latencies of one HTTP request as its client reads it: a slow client counts as slow tokens.

    Attributes:
        first_token_s: Seconds from receiving the request to its first token; None before it.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.first_token_s: float | None = None
        self._traffic = traffic
        self._begun = time.monotonic()
        self._last: dict[int, float] = {}  # by prompt: time of its latest update with tokens
        self._flushed = self._begun
        self._gaps: list[float] = []  # times between tokens that ``flush`` will add
        self._tokens = 0  # generated tokens that ``flush`` will add
        self._ended = set[tuple[int, int]]()

    def observe(self, prompt: int, update: RequestUpdate) -> None:
        """Count the tokens and finished completions of the next update of prompt number ``prompt``."""
        traffic, now = self._traffic, time.monotonic()
        most = max(len(completion.token_ids) for completion in update.completions)
        if most > 0:
            if (last := self._last.get(prompt)) is None:
                traffic.prompt_tokens.inc(len(update.request.prompt_token_ids))
                traffic.first_token.observe(now - self._begun)
                if self.first_token_s is None:
                    self.first_token_s = now - self._begun
            else:
                self._gaps.append((now - last) / most)
            self._last[prompt] = now
            self._tokens += update.tokens
            if now >= self._flushed + FLUSH_S:
                self._flushed = now
                self.flush()
        for completion in update.completions:
            key = prompt, completion.index
            if completion.finish_reason is not None and key not in self._ended:
                self._ended.add(key)
                traffic.completions.labels(completion.finish_reason.value).inc()
        if update.finished:
            traffic.duration.observe(now - self._begun)
            self.flush()

    def flush(self) -> None:
        """Add what ``observe`` has gathered to the metrics. Call it when the client has left."""
        if self._tokens:
            self._traffic.generated_tokens.inc(self._tokens)
            self._traffic.between_tokens.observe_all(self._gaps)
            self._tokens, self._gaps = 0, []


MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"

VLLM_NAMES = {
    "lamina_requests_running": "vllm:num_requests_running",
    "lamina_requests_waiting": "vllm:num_requests_waiting",
    "lamina_kv_usage": "vllm:kv_cache_usage_perc",
    "lamina_preemptions": "vllm:num_preemptions",
    "lamina_prefix_cache_queries": "vllm:prefix_cache_queries",
    "lamina_prefix_cache_hits": "vllm:prefix_cache_hits",
    "lamina_prompt_tokens": "vllm:prompt_tokens",
    "lamina_generated_tokens": "vllm:generation_tokens",
    "lamina_completions": "vllm:request_success",
    "lamina_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "lamina_time_between_tokens_seconds": "vllm:inter_token_latency_seconds",
    "lamina_request_duration_seconds": "vllm:e2e_request_latency_seconds",
}
"""vLLM's names of metrics with the same meaning. They are exported too, labelled ``model_name``, for its dashboards."""

__all__ = ["CONTENT_TYPE", "Metrics"]


class _Collected:
    """Adapts collected metrics to the registry interface that ``generate_latest`` reads."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class Metrics:
    """The metrics of one engine and of the server in front of it.

    Attributes:
        traffic: Metrics that the server updates.
    """

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        # The "_created" series add one series per histogram and counter, and no query needs them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._traffic_registry = CollectorRegistry(auto_describe=False)
        if MULTIPROCESS in os.environ:  # frontends share their counts in files
            MultiProcessCollector(self._traffic_registry)  # type: ignore[no-untyped-call]
            self.traffic = Traffic(CollectorRegistry())
        else:
            self.traffic = Traffic(self._traffic_registry)

    def text(self) -> bytes:
        """Return all metrics in the exposition format of ``CONTENT_TYPE``."""
        families = [*self.collect(), *self._traffic_registry.collect()]
        shared = [self._as_vllm(family) for family in families if family.name in VLLM_NAMES]
        return generate_latest(_Collected([*families, *shared]))

    def _as_vllm(self, family: Metric) -> Metric:
        """Return a copy of a metric under vLLM's name and labels."""
        name = VLLM_NAMES[family.name]
        copy = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {"model_name": self._engine.model_name, **sample.labels}
            if (reason := labels.pop("finish_reason", None)) is not None:
                labels["finished_reason"] = reason
            copy.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
        return copy

    def totals(self) -> dict[str, Any]:
        """Return the server's counts of tokens and its cumulative latency histograms as JSON.

        ``tokens`` has prompt and generated tokens; ``latency`` has, by name, pairs of an upper bound in seconds (None:
        no bound) and the observations up to it.
        """
        samples = {
            sample.name + sample.labels.get("le", ""): (sample.labels.get("le"), sample.value)
            for family in self._traffic_registry.collect()
            for sample in family.samples
        }
        latency = {
            name: [
                (None if bound == "+Inf" else float(bound), value)
                for key, (bound, value) in samples.items()
                if bound is not None and key.startswith(f"lamina_{name}_seconds_bucket")
            ]
            for name in ("time_to_first_token", "time_between_tokens")
        }
        tokens = {name: samples.get(f"lamina_{name}_tokens_total", (None, 0.0))[1] for name in ("prompt", "generated")}
        return {"tokens": tokens, "latency": latency}

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics."""
        stats = self._engine.stats()
        yield GaugeMetricFamily("lamina_up", "1 while the engine runs, 0 once it has stopped.", int(stats.dead is None))
        yield GaugeMetricFamily("lamina_requests_running", "Requests admitted and not finished.", stats.running)
        yield GaugeMetricFamily("lamina_requests_waiting", "Requests waiting to be admitted.", stats.waiting)
        for name, help_text, count in (
            ("steps", "Steps completed, including those that only release sequences.", stats.steps),
            ("preemptions", "Requests whose KV was dropped, to be computed again later.", stats.preempted),
            ("recoveries", "Losses of workers after which the engine continued.", stats.recoveries),
            ("tokens_recomputed", "Tokens computed again because a worker was lost.", stats.recomputed),
            ("prefix_cache_queries", "Tokens of requests looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache, and so not computed.", stats.prefix_hits),
            ("kv_tokens_spilled", "Tokens whose KV was copied to a disk.", stats.spilled),
            ("kv_tokens_fetched", "Tokens whose KV came back from a disk.", stats.fetched),
        ):
            yield CounterMetricFamily(f"lamina_{name}", help_text, count)
        yield from self._memory(stats)
        yield from self._workers(stats)
        yield from self._roles(stats)
        yield from self._scaling(stats)
        yield from self._links(stats)

    def _memory(self, stats: EngineStats) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "lamina_kv_imbalance",
            "Token slots in use on the fullest memory worker over the mean of all.",
            imbalance(stats.memory),
        )
        used_slots, all_slots = stats.slots
        yield GaugeMetricFamily(
            "lamina_kv_usage",
            "Share of all token slots that requests use, from 0 to 1.",
            used_slots / max(1, all_slots),
        )
        moved = CounterMetricFamily(
            "lamina_kv_moved_bytes", "Bytes of KV in use that moved to this memory worker.", labels=["worker"]
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

    def _workers(self, stats: EngineStats) -> Iterator[Metric]:
        workers = GaugeMetricFamily(
            "lamina_workers",
            "1 for every worker, by its state: serving, joining or leaving.",
            labels=["worker", "state"],
        )
        for worker, state in stats.workers.items():
            workers.add_metric([worker, state], 1)
        yield workers

    def _links(self, stats: EngineStats) -> Iterator[Metric]:
        links = GaugeMetricFamily(
            "lamina_links",
            "Pairs of workers, by transport and the reason for its choice.",
            labels=["transport", "reason"],
        )
        for choice, pairs in stats.links:
            links.add_metric([choice.transport.value, choice.reason], pairs)
        yield links

    def _roles(self, stats: EngineStats) -> Iterator[Metric]:
        roles = GaugeMetricFamily(
            "lamina_worker_roles",
            "1 for every compute worker, by what it runs, its replica, and its stage and rank there if it has several.",
            labels=["worker", "role", "replica", "stage", "rank"],
        )
        for worker, place in stats.places.items():
            roles.add_metric([worker, *(place[label] for label in ("role", "replica", "stage", "rank"))], 1)
        yield roles
        yield CounterMetricFamily(
            "lamina_handovers", "Requests that went from a worker for prompts to one that decodes.", stats.handovers
        )
        yield GaugeMetricFamily(
            "lamina_scratch_tokens", "Tokens reserved on compute workers for attention of prompts.", stats.scratch
        )
        parked = CounterMetricFamily(
            "lamina_parked", "Messages that waited until K and V of earlier chunks were stored.", labels=["worker"]
        )
        nbytes = CounterMetricFamily("lamina_parked_bytes", "Bytes of q, k and v in these.", labels=["worker"])
        for worker, memory in stats.memory.items():
            parked.add_metric([worker], memory.parked)
            nbytes.add_metric([worker], memory.parked_nbytes)
        yield from (parked, nbytes)

    def _scaling(self, stats: EngineStats) -> Iterator[Metric]:
        load = GaugeMetricFamily(
            "lamina_autoscale_load", "Load of a pool, as the number of workers that it would fill.", labels=["pool"]
        )
        bounds = GaugeMetricFamily(
            "lamina_autoscale_bound", "Smallest and largest number of workers of a pool.", labels=["pool", "bound"]
        )
        changes = CounterMetricFamily(
            "lamina_autoscale_workers",
            "Workers added to or removed from a pool because of its load.",
            labels=["pool", "change"],
        )
        latest = GaugeMetricFamily(
            "lamina_autoscale_latest_seconds",
            "Unix time of the last decision on a pool's size, by reason.",
            labels=["pool", "why"],
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
