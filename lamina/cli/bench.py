"""`lamina bench`: how fast a batch decodes, where the time of its steps went, and what is the bottleneck."""

import random
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli import options
from lamina.errors import LaminaError
from lamina.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from lamina.engine.bringup import Cluster
    from lamina.engine.engine import Engine
    from lamina.transport.timeline import Span

TIMEOUT_S = 900.0


def bench(
    invocation: typer.Context,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode at once.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, drawn at random.")] = 512,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens that each request draws.")] = 64,
    model: options.Model = None,
    compute: options.Compute = "cpu:1",
    memory: options.Memory = "cpu:1",
    load_format: options.Weights = "auto",
    dtype: options.DTypeName = "auto",
    threads: options.Threads = None,
    lanes: options.Lanes = "auto",
    pipelining: options.PipeliningName = "auto",
    q_first: options.QFirst = False,
    mini_batches: options.MiniBatches = 1,
    plan_ahead: options.PlanAhead = True,
    transport: options.Transport = "auto",
    compute_cores: options.ComputeCores = None,
    memory_cores: options.MemoryCores = None,
    trace: options.Trace = None,
) -> None:
    """Decode a batch of random prompts and say where the time went. Or measure something else, see the commands."""
    if invocation.invoked_subcommand is not None:
        return
    from lamina.cluster.local import launch
    from lamina.config import EngineConfig
    from lamina.observe.progress import loading_progress

    config = EngineConfig(
        model=model,
        compute=compute,
        memory=memory,
        load_format=load_format,
        dtype=options.as_dtype(dtype),
        threads=threads,
        max_num_seqs=max(batch, 256),
        lanes=options.as_lanes(lanes),
        pipelining=pipelining,
        q_first=q_first,
        mini_batches=mini_batches,
        plan_ahead=plan_ahead,
        transport=transport,
        compute_cores=compute_cores,
        memory_cores=memory_cores,
        trace=trace,
    )
    spans: dict[str, list[Span]] = {}
    with loading_progress() as on_progress:
        engine = launch(config, on_progress, spans.update)
    try:
        begin_ns, end_ns, drawn = _decode(engine, batch, context, tokens)
    finally:
        engine.close()
    _show(spans, begin_ns, end_ns, drawn)
    _show_network(engine.cluster)


def _decode(engine: "Engine", batch: int, context: int, tokens: int) -> tuple[int, int, int]:
    """(begin, end, tokens drawn between): from the last prompt's first token to the first request's last."""
    arrivals: list[list[int]] = [[] for _ in range(batch)]
    unfinished = set(range(batch))
    errors: list[str] = []
    done = threading.Event()

    def on_output(output: RequestOutput) -> None:
        index = int(output.request_id)
        arrivals[index].append(time.monotonic_ns())
        if output.finished:
            errors.extend([output.error] if output.error else [])
            unfinished.discard(index)
            if not unfinished:
                done.set()

    draw = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for index in range(batch):
        prompt = [draw.randrange(engine.tokenizer.vocab_size) for _ in range(context)]
        engine.submit(str(index), prompt, params, on_output)
    if not done.wait(TIMEOUT_S):
        raise LaminaError(f"{len(unfinished)} of {batch} requests did not end within {TIMEOUT_S:.0f} s")
    if errors:
        raise LaminaError(errors[0])
    begin, end = max(own[0] for own in arrivals), min(own[-1] for own in arrivals)
    if end <= begin:
        raise LaminaError(
            "the first request ended before the last prompt was done; give more tokens or a smaller batch"
        )
    return begin, end, sum(begin < when <= end for own in arrivals for when in own)


def _show(spans: "Mapping[str, list[Span]]", begin_ns: int, end_ns: int, drawn: int) -> None:
    from rich.table import Table

    from lamina.cli.console import output
    from lamina.observe.trace import bottleneck, shares

    parts = shares(spans, begin_ns, end_ns)
    seconds = (end_ns - begin_ns) / 1e9
    table = Table(title=f"Where {seconds:.2f} s of decoding went", title_justify="left", title_style="bold")
    for name in ("worker", "stage"):
        table.add_column(name)
    for name in ("seconds", "share"):
        table.add_column(name, justify="right")
    for part in parts:
        table.add_row(part.worker, part.stage, f"{part.seconds:.3f}", f"{part.share:.0%}")
    output().print(table)
    worst = bottleneck(parts)
    output().print(
        f"[bold]{drawn / seconds:.1f} tokens/s[/]. The bottleneck is [bold]{worst.stage}[/] on {worst.worker}: "
        f"{worst.share:.0%} of the time.",
        soft_wrap=True,
    )


def _show_network(cluster: "Cluster") -> None:
    from lamina.cli.console import output
    from lamina.transport.choice import summary
    from lamina.transport.wire import nbytes_per_token, paper_nbytes_per_token

    ours, paper = (count(cluster.attentions, cluster.dtype) for count in (nbytes_per_token, paper_nbytes_per_token))
    output().print(
        f"A token takes {ours} bytes between workers, {ours / paper:.2f} of the paper's (2 + 2/G) e d L = {paper:.0f}: "
        f"{', '.join(summary(cluster.links))}.",
        soft_wrap=True,
    )
