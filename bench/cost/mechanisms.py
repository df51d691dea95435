"""Compares mechanisms that papers report with the cost model, and lists the mechanisms that it lacks."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.cost import pooled
from bench.cost.bursts import LOAD_BYTES_S
from bench.cost.lamina_paper import cost_model
from bench.cost.long_context import Servers
from bench.cost.page import Section
from bench.cost.published import Comparison
from bench.cost.transfers import send_recv_seconds
from lamina.core.pipeline import Shape
from lamina.planning.plan import hardware, model_shapes, workload
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.planner import evaluate_group
from lamina.planning.simulate import Deployment
from lamina.planning.simulate.scenario import Ints


def mechanisms(published: Mapping[str, Any], catalogue: hardware.Catalogue) -> Section:
    """Rows of four papers: published, ours, ratio and a sentence; then what is not modelled yet."""
    section = Section("Mechanisms of four papers", published["paper"])
    a100, h100 = catalogue["a100"], catalogue["h100"]
    section.compare(
        "What the cost model covers",
        [
            *_longest(published, a100),
            *_attention(published, a100, h100),
            *_migration(published, a100),
            *_movement(published, a100),
        ],
    )
    section.compare(
        "What the simulator plays",
        [
            *_one_large(published, a100),
            *_some_long(published, a100),
        ],
    )
    section.text(
        f"All requests come at once, {pooled.REQUESTS} of them; throughput is that until {pooled.DONE:.0%} have ended. "
        "Contexts of Infinite-LLM's traces are log-normal with the mean and deviation of its Table 1, DistKV-LLM's are "
        f"even over its ranges; up to half of a context, at most {pooled.OUTPUT} tokens, is generated. The papers "
        "state none of this. Copies lend each other the blocks that they have free, and attend to what lies in them "
        "for the borrower."
    )
    section.table(
        "What the text says without numbers",
        ("figure", "published", "ours"),
        [_shipped(a100)],
    )
    return section


def _longest(published: Mapping[str, Any], a100: hardware.Hardware) -> list[Comparison]:
    """Longest contexts: KV slots of one instance and of several together."""
    rows = []
    for setup in published["longest_contexts"]:
        model = cost_model(model_shapes.find(setup["model"]), a100)
        degree, instances = setup["tensor_parallel"], setup["instances"]
        free = degree * model.usable_bytes - model.shape.weight_bytes
        rows.append(
            Comparison(
                f"longest context, {setup['model']}, {instances} x TP{degree}",
                "tokens",
                setup["source"],
                setup["tokens"],
                instances * free / model.shape.kv_bytes_per_token,
                "Ours is all memory but the weights and a tenth, times the instances; the papers do not say what else "
                "their memory holds.",
            )
        )
    return rows


def _movement(published: Mapping[str, Any], a100: hardware.Hardware) -> list[Comparison]:
    """A decode step beside which KV of some tokens moves: it takes the longer of both."""
    setup = published["movement"]
    model = cost_model(model_shapes.find(setup["model"]), a100)
    batch = evaluate_group(model, 1, workload.of_context(1000))
    assert batch is not None
    rows = []
    for row in setup["rows"]:
        nbytes = row["tokens"] * model.shape.kv_bytes_per_token
        fast_s, slow_s = float(send_recv_seconds(model, nbytes)), nbytes / setup["ethernet_bytes_s"]
        rows.append(
            Comparison(
                f"{row['tokens']} tokens of KV moved a step: over NVLink, over the cluster's Ethernet",
                "%",
                setup["source"],
                row["percent"],
                (100 * max(0.0, fast_s / batch.tbt_s - 1), 100 * max(0.0, slow_s / batch.tbt_s - 1)),
                f"They take {fast_s * 1e3:.2f} ms over NVLink and {slow_s * 1e3:.0f} ms at 125 MB/s; our step of the "
                f"largest batch at 1,000 tokens takes {batch.tbt_s * 1e3:.0f} ms. The paper names neither the link nor "
                "the step.",
            )
        )
    return rows


def _deployment(setup: Mapping[str, Any], device: hardware.Hardware, copies: int, degree: int) -> Deployment:
    return Deployment(
        model=model_shapes.find(setup["model"]),
        compute=device,
        compute_workers=copies * degree,
        shape=Shape(degree),
        prefix_cache=False,
    )


def _over_one(setup: Mapping[str, Any], device: hardware.Hardware, contexts: Ints) -> float:
    """Throughput of copies that lend each other memory, over that of one copy on all of the devices."""
    copies, degree = setup["instances"], setup["tensor_parallel"]
    several = pooled.throughput(_deployment(setup, device, copies, degree), contexts, pooled=True)
    return several / pooled.throughput(_deployment(setup, device, 1, copies * degree), contexts, pooled=False)


def _instances(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = sorted({row["instances"] for row in rows})
    return " and ".join(map(str, counts))


def _one_large(published: Mapping[str, Any], a100: hardware.Hardware) -> list[Comparison]:
    setup = published["one_large"]
    ratios = []
    for row in setup["rows"]:
        drawn = row["mean"], row["deviation"], row["longest"], pooled.REQUESTS
        ratios.append(_over_one(row, a100, pooled.lengths(*drawn)))
    return [
        Comparison(
            f"{_instances(setup['rows'])} copies that lend over one TP group, Traces 3, 4 and 6",
            "times",
            setup["source"],
            tuple(setup["times"]),
            (min(ratios), max(ratios)),
            _ONE_LARGE,
        )
    ]


def _some_long(published: Mapping[str, Any], a100: hardware.Hardware) -> list[Comparison]:
    rows = []
    for row in published["some_long"]["rows"]:
        ratios = [
            _over_one(setup, a100, pooled.ranges(setup["normal"], setup["longest"], row["share"], pooled.REQUESTS))
            for setup in published["some_long"]["setups"]
        ]
        rows.append(
            Comparison(
                f"{_instances(published['some_long']['setups'])} copies that lend over one TP group, "
                f"{row['share']:.0%} long requests",
                "times",
                published["some_long"]["source"],
                tuple(row["times"]),
                (min(ratios), max(ratios)),
                _ONE_LARGE,
            )
        )
    return rows


_ONE_LARGE = (
    "In ours, a group over NVLink computes prompts nearly as fast for each device as one device does, and holds the "
    "weights once, while one copy alone computes a long prompt, for which the others keep memory; in the paper, "
    "weights divided over more devices are used far less well."
)


def _shipped(a100: hardware.Hardware) -> tuple[str, str, str]:
    model = cost_model(model_shapes.find("Llama-2-13B"), a100)
    shape = model.shape
    query_s = 2 * float(send_recv_seconds(model, shape.hidden * shape.dtype.itemsize))
    kv_s = [float(send_recv_seconds(model, n * shape.kv_bytes_per_token / shape.layers)) for n in (1_000, 100_000)]
    remote = [query_s + float(model.attention_seconds(n, 1)) for n in (1_000, 100_000)]
    local = [one + float(model.attention_seconds(n, 1)) for one, n in zip(kv_s, (1_000, 100_000), strict=True)]
    ratios = [own / other for own, other in zip(local, remote, strict=True)]
    return (
        "DistKV-LLM, Figure 12",
        "fetching remote KV takes far longer than attending to it where it lies",
        f"one layer of Llama-2-13B over NVLink: {ratios[0]:.1f} times as long at 1K tokens, {ratios[1]:.1f} at 100K",
    )


def _attention(published: Mapping[str, Any], a100: hardware.Hardware, h100: hardware.Hardware) -> list[Comparison]:
    dist, divided = (published[name] for name in ("dist_attention", "two_groups"))
    small = cost_model(model_shapes.find("Llama-3-8B"), h100)
    thirteen, seventy = (cost_model(model_shapes.find(name), a100) for name in ("Llama-2-13B", "Llama-2-70B"))
    ratios = [100 * (_by_heads(thirteen, n, 4) / _by_tokens(thirteen, n, 4, 1) - 1) for n in dist["contexts"]]
    slower = [100 * (_by_tokens(seventy, n, 2, 4) / _by_heads(seventy, n, 8) - 1) for n in divided["contexts"]]
    chunks = published["small_chunks"]
    million = 1_000_000
    small_chunk, large_chunk = (_prefill_attention(small, million, chunks[size]) for size in ("small", "large"))
    gpus = published["gpus_for_30_s"]
    rows = [
        Comparison(
            "DistAttention faster than heads on 4 A100, 4K to 256K",
            "%",
            dist["source"],
            tuple(dist["percent"]),
            (min(ratios), max(ratios)),
            "Both read the same KV. Ours sums the heads' outputs with vLLM's own kernel, in 6 us, and sends query and "
            "output by NCCL's send and receive, which take longer; the paper's all-reduce costs more than messages.",
        ),
        Comparison(
            "2 x TP4 by tokens slower than TP8 by heads, 300K to 600K",
            "%",
            divided["source"],
            tuple(divided["percent"]),
            (min(slower), max(slower)),
            "Ours adds a message each way, by NCCL over NVLink, to attention that reads the same bytes; the paper's "
            "messages take less.",
        ),
        Comparison(
            "attention of 1M tokens in chunks of 32 over 2048, less 1",
            "%",
            chunks["source"],
            chunks["percent"],
            100 * (small_chunk / large_chunk - 1),
            "Ours rounds a chunk up to tiles of 128 rows, of which 32 use a quarter, and launches a kernel for each; "
            "no measured kernel had such chunks.",
        ),
    ]
    for row in gpus["rows"]:
        need = next(n for n in range(1, 200) if Servers(small, stages=n).ttft(row["tokens"], 4096) <= gpus["ttft_s"])
        rows.append(
            Comparison(
                f"GPUs for {row['tokens'] // million}M tokens in {gpus['ttft_s']} s, 8B",
                "GPUs",
                gpus["source"],
                row["gpus"],
                8 * need,
                "Ours counts whole servers of 8, and chunks at the rates of our fits; the paper's is theoretical.",
            )
        )
    return rows


def _migration(published: Mapping[str, Any], a100: hardware.Hardware) -> list[Comparison]:
    """Compare a sequence that continues on another worker when it outgrows its own with its migration to a larger
    instance, which must load the weights and compute the KV again."""
    setup = published["live_migration"]
    model, prompt = cost_model(model_shapes.find(setup["model"]), a100), setup["prompt"]
    moving_s = model.shape.weight_bytes / 2 / LOAD_BYTES_S + model.prefill_seconds(prompt, 4096, 2)
    rows = []
    for row in setup["rows"]:
        step_s = model.pass_seconds(1) + model.shape.layers * model.attention_seconds(prompt + row["tokens"] / 2, 1)
        rows.append(
            Comparison(
                f"{row['tokens']} tokens behind {prompt}: migration over growing onto another GPU",
                "times",
                setup["source"],
                row["times"],
                1 + moving_s / (row["tokens"] * float(step_s)),
                f"Ours loads weights at an assumed {LOAD_BYTES_S / 1e9:g} GB/s a device and computes the KV again, in "
                f"{moving_s:.0f} s; the paper downloads the model from S3, at a rate that it does not state.",
            )
        )
    return rows


def _by_heads(model: CostModel, context: int, devices: int) -> float:
    """One layer's decode attention with heads divided, and the output summed over the devices."""
    read = float(model.attention_seconds(context, 1, 1 / devices))
    return read + float(model.all_reduce_seconds(model.shape.hidden * model.shape.dtype.itemsize, devices))


def _by_tokens(model: CostModel, context: int, parts: int, tensor_parallel: int) -> float:
    """Return seconds of ``_by_heads`` with tokens divided over groups that divide the heads, with messages."""
    shape = model.shape
    query = shape.query_heads * shape.head_size * shape.dtype.itemsize / tensor_parallel
    read = float(model.attention_seconds(context / parts, 1, 1 / tensor_parallel))
    summed = float(model.all_reduce_seconds(shape.hidden * shape.dtype.itemsize, tensor_parallel))
    return read + 2 * float(send_recv_seconds(model, query)) + summed


def _prefill_attention(model: CostModel, prompt: int, chunk: int) -> float:
    starts = range(0, prompt, chunk)
    sizes = [min(chunk, prompt - start) for start in starts]
    return float(model.chunk_attention_seconds(sizes, list(starts), 8).sum())
