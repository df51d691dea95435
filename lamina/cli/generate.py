"""`lamina generate`: completes prompts, then shows how fast, and where their KV was kept."""

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli import options
from lamina.cli.console import notes, output, print_error, print_table, print_text
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import RequestError
from lamina.core.types import KvElement, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from lamina.engine.engine import Engine


@options.engine_options
def generate(
    config: EngineConfig,
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue. Default: standard input.")] = None,
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
) -> None:
    """Continue one or several texts.

    Only the new text goes to standard output, as it is generated.
    """
    texts = prompts or [_standard_input()]
    if not all(texts):
        raise RequestError(f"prompt {texts.index('')} is empty; every prompt needs some text")
    params = options.sampling_params(config, max_tokens, temperature, top_p, seed)
    from lamina.sdk import Lamina

    start = time.perf_counter()
    with Lamina.from_config(config) as lamina:
        loaded = time.perf_counter()
        outputs = _print_texts(lamina.stream_batch(texts, params), texts)
        ended = time.perf_counter()
        _show_figures(outputs, params, load_s=loaded - start, generate_s=ended - loaded)
        _show_placement(lamina.engine, outputs)
    if any(output.error for output in outputs):
        raise typer.Exit(1)


def _print_texts(updates: Iterable[tuple[int, RequestOutput]], prompts: list[str]) -> list[RequestOutput]:
    """Print the texts as they are generated, in the order of the prompts; returns the final outputs."""
    newest: dict[int, RequestOutput] = {}
    shown, printed = 0, 0  # the request being printed, and how many of its characters have been
    _print_heading(0, prompts[0])
    for index, update in updates:
        newest[index] = update
        while shown in newest:
            request = newest[shown]
            text = request.outputs[0].text
            print_text(text[printed:], end="\n" if request.finished else "")
            printed = len(text)
            if not request.finished:
                break
            if request.error:
                print_error(request.error)
            shown, printed = shown + 1, 0
            if shown < len(prompts):
                _print_heading(shown, prompts[shown])
    return [newest[index] for index in sorted(newest)]


def _print_heading(number: int, prompt: str) -> None:
    notes().rule(f"request {number}", align="left", style="dim")
    # On a terminal, the text continues its prompt on the same line.
    print_text(prompt, "bold", end="" if output().is_terminal else "\n", console=notes())


def _standard_input() -> str:
    given = sys.stdin is not None and not sys.stdin.isatty()  # None: the parent process closed it
    text = sys.stdin.read().removesuffix("\n") if given else ""
    if not text:
        raise RequestError('no prompt. Give one, as in: lamina generate "def fibonacci(n):", or pipe text in')
    return text


def _show_figures(outputs: list[RequestOutput], params: SamplingParams, *, load_s: float, generate_s: float) -> None:
    prompt = sum(len(request.prompt_token_ids) for request in outputs)
    drawn = sum(len(completion.token_ids) for request in outputs for completion in request.outputs)
    notes().rule(style="dim")
    notes().print(
        f"[bold]{drawn / generate_s:.1f} tokens/s[/]: {drawn} tokens generated after {prompt} prompt tokens "
        f"in {generate_s:.2f} s. Starting the workers and loading the model took {load_s:.1f} s.",
        soft_wrap=True,
    )
    if params.temperature > 0:
        notes().print(
            f"Sampled with seed {params.seed}; --seed {params.seed} gives the same text again.", soft_wrap=True
        )


def _show_placement(engine: "Engine", outputs: list[RequestOutput]) -> None:
    """Show every segment of every request: which worker kept which tokens of which heads."""
    from rich.table import Table

    loaded = engine.cluster.loaded
    element = KvElement.from_setting(engine.config.kv_cache_dtype, loaded.dtype)
    per_token = sum(spec.slab_bytes_per_token(element) for spec in loaded.attentions)
    heads = max(spec.kv_heads for spec in loaded.attentions)
    table = Table(title="Where each request's KV was kept", title_justify="left", title_style="bold")
    for name, justify in (("request", "right"), ("memory worker", "left"), ("KV heads", "left"), ("tokens", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    table.add_column("KV", justify="right")
    for number, request in enumerate(outputs):
        for segment in request.placement:
            start, stop = segment.tokens
            low, high = segment.heads
            stop = start if stop is None else stop
            nbytes = (stop - start) * per_token * (high - low) / heads
            tokens = f"{start} to {stop - 1}" if start < stop else "none"
            row = (str(number), segment.worker, f"{low} to {high - 1}", tokens, _size(nbytes))
            table.add_row(*row)
    print_table(table, notes())


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
