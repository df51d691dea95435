"""What the papers report of mechanisms: beside ours where the cost model has them, else what is missing for it."""

from collections.abc import Mapping
from typing import Any

from bench.cost.bursts import LOAD_BYTES_S
from bench.cost.lamina_paper import cost_model
from bench.cost.long_context import Servers
from bench.cost.page import Section
from bench.cost.published import Comparison
from lamina.plan import hardware, models
from lamina.plan.cost import CostModel


def mechanisms(published: Mapping[str, Any], catalogue: hardware.Catalogue) -> Section:
    """Rows of four papers: published, ours, ratio and a sentence; then what is not modelled yet."""
    section = Section("Mechanisms of four papers", published["paper"])
    a100, h100 = catalogue["a100"], catalogue["h100"]
    section.compare(
        "What the cost model covers",
        [*_pooled(published, a100), *_attention(published, a100, h100), *_migration(published, a100)],
    )
    section.table(
        "Not modelled yet",
        ("figure", "published", "needs"),
        [(row["figure"], row["published"], row["needs"]) for row in published["missing"]],
    )
    section.text(
        "Nothing of ours stands beside these: the simulator's workers are a fixed set, KV lies beside the weights only "
        "if there is one copy of them, and a prompt is computed on one replica."
    )
    return section


def _pooled(published: Mapping[str, Any], a100: hardware.Hardware) -> list[Comparison]:
    """Longest contexts: KV slots of one instance and of several together."""
    rows = []
    for setup in published["longest_contexts"]:
        model = cost_model(models.find(setup["model"]), a100)
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


def _attention(published: Mapping[str, Any], a100: hardware.Hardware, h100: hardware.Hardware) -> list[Comparison]:
    dist, divided, batching = (published[name] for name in ("dist_attention", "two_groups", "batching"))
    small = cost_model(models.find("Llama-3-8B"), h100)
    server = Servers(small)
    thirteen, seventy = (cost_model(models.find(name), a100) for name in ("Llama-2-13B", "Llama-2-70B"))
    ratios = [100 * (_by_heads(thirteen, n, 4) / _by_tokens(thirteen, n, 4, 1) - 1) for n in dist["contexts"]]
    slower = [100 * (_by_tokens(seventy, n, 2, 4) / _by_heads(seventy, n, 8) - 1) for n in divided["contexts"]]
    chunks = published["small_chunks"]
    million = 1_000_000
    small_chunk, large_chunk = (_prefill_attention(small, million, chunks[size]) for size in ("small", "large"))
    delay = published["head_of_line"]
    longest_step = server.ttft(million, 4096) - server.ttft(million - 4096, 4096)
    mixed = _mixed_step(small, batching["chunk"], batching["batch"]) / _mixed_step(small, batching["chunk"], 0)
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
        Comparison(
            "delay of others behind a 1M prompt, one chunk of 4096",
            "ms",
            delay["source"],
            delay["ms"],
            1e3 * longest_step / delay["stages"],
            f"Ours is the last chunk's time on one of {delay['stages']} pipeline stages; the paper does not say what "
            "else its figure contains.",
        ),
        Comparison(
            f"step with {batching['batch']} decodes over one without, chunk of {batching['chunk']}, less 1",
            "%",
            batching["source"],
            tuple(batching["percent"]),
            100 * (mixed - 1),
            "The paper does not say how long the decoding sequences are; ours have 1024 tokens.",
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
    """A sequence that outgrows its worker goes on on another one; or all of it goes to a larger instance, which must
    load the weights and compute the KV again."""
    setup = published["live_migration"]
    model, prompt = cost_model(models.find(setup["model"]), a100), setup["prompt"]
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
    """The same with tokens divided over groups that divide the heads: a query there, its output back."""
    shape = model.shape
    query = shape.query_heads * shape.head_size * shape.dtype.itemsize / tensor_parallel
    read = float(model.attention_seconds(context / parts, 1, 1 / tensor_parallel))
    summed = float(model.all_reduce_seconds(shape.hidden * shape.dtype.itemsize, tensor_parallel))
    return read + 2 * float(model.send_recv_seconds(query)) + summed


def _prefill_attention(model: CostModel, prompt: int, chunk: int) -> float:
    starts = range(0, prompt, chunk)
    sizes = [min(chunk, prompt - start) for start in starts]
    return float(model.chunk_attention_seconds(sizes, list(starts), 8).sum())


def _mixed_step(model: CostModel, chunk: int, decodes: int) -> float:
    """A step of a server: a chunk late in a prompt of a million tokens, and decoding sequences of 1024 tokens."""
    attention = float(model.chunk_attention_seconds(chunk, 1_000_000 - chunk, 8))
    attention += float(model.attention_seconds(decodes * 1024, decodes, 1 / 8)) if decodes else 0.0
    return float(model.pass_seconds(chunk + decodes, 8)) + model.shape.layers * attention
