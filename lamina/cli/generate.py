"""Commands that generate text in a terminal: `lamina generate` continues texts, `lamina chat` holds a conversation."""

import re
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from lamina.cli import options
from lamina.cli.console import notes, output, print_error, print_table, print_text, show_size
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError, EngineDeadError, RequestError
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import KvElement

if TYPE_CHECKING:
    from lamina.engine.engine import Engine
    from lamina.sdk import Lamina

HELP = "/reset starts a new conversation, /exit quits, /help shows this; Ctrl-C stops an answer."

_COMMAND = re.compile(r"/[a-z]+")

Messages = Sequence[Mapping[str, str]]


class Model(Protocol):
    """Source of answers: an engine in this process, or a server."""

    name: str

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        """Yield the answer in pieces; closing the iterator cancels it. Raises RequestError if the request fails."""
        ...


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
    shown, printed = 0, 0  # index of the request being printed, and characters of it printed so far
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
    from rich.table import Column, Table

    loaded = engine.cluster.loaded
    element = KvElement.from_setting(engine.config.kv_cache_dtype, loaded.dtype)
    per_token = sum(spec.slab_bytes_per_token(element) for spec in loaded.attentions)
    heads = max(spec.kv_heads for spec in loaded.attentions)
    title = "Where each request's KV was kept"
    columns = Column("request", justify="right"), "memory worker", "KV heads", "tokens", Column("KV", justify="right")
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for number, request in enumerate(outputs):
        for segment in request.placement:
            start, stop = segment.tokens
            low, high = segment.heads
            stop = start if stop is None else stop
            nbytes = (stop - start) * per_token * (high - low) / heads
            tokens = f"{start} to {stop - 1}" if start < stop else "none"
            row = (str(number), segment.worker, f"{low} to {high - 1}", tokens, show_size(nbytes))
            table.add_row(*row)
    print_table(table, notes())


@options.engine_options
def chat(
    config: EngineConfig,
    url: Annotated[
        str | None, typer.Option(help="Talk to the server that runs there instead of starting an engine.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key that the server of --url asks for.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message at the start of the conversation.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens per answer. Default: the model's, or the rest of its context.")
    ] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
) -> None:
    """Talk to a model. Reads one message per line; /exit or end of input quits, /help lists the other commands."""
    if url is not None:
        from lamina.cli.client import RemoteModel

        if config != EngineConfig():
            raise ConfigError("--url talks to a running server, which has its settings: leave out those of an engine")
        options.check_sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        server = RemoteModel(url, {name: value for name, value in given.items() if value is not None}, api_key)
        Conversation(server, system).converse()
        return
    params = options.sampling_params(config, max_tokens, temperature, top_p, seed)
    from lamina.sdk import Lamina

    with Lamina.from_config(config) as lamina:
        if sys.stdin.isatty() and config.model is None:
            output().print("[dim]The bundled model only continues Python source; give --model DIR for a chat model.[/]")
        Conversation(_Local(lamina, params), system).converse()


class _Local:
    def __init__(self, lamina: "Lamina", params: SamplingParams) -> None:
        self.name = lamina.engine.model_name
        self._lamina, self._params = lamina, params

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        from lamina.text.prompts import encode_chat

        engine, tokenizer, shown = self._lamina.engine, self._lamina.tokenizer, 0
        prompt = encode_chat(tokenizer, tokenizer.apply_chat_template(messages), engine.max_model_len)
        with closing(self._lamina.stream(prompt, self._params)) as outputs:
            for output in outputs:
                text = output.outputs[0].text
                yield text[shown:]
                shown = len(text)
                if output.error:
                    dead = engine.stats().dead is not None  # nothing more can be answered
                    raise EngineDeadError(output.error) if dead else RequestError(output.error)


class Conversation:
    """A conversation in the terminal. ``system``: Its system message."""

    def __init__(self, model: Model, system: str | None = None) -> None:
        self._model = model
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)

    def converse(self) -> None:
        """Read messages and print answers until /exit or the end of input."""
        if sys.stdin.isatty():
            print_text(f"{self._model.name}: {HELP}\n", console=notes())
        while (line := _read_line()) is not None and (word := line.strip()) != "/exit":
            if word == "/reset":
                self._messages = list(self._start)
            elif _COMMAND.fullmatch(word):
                wrong = "" if word == "/help" else f"There is no command {word}. "
                print_text(f"{wrong}{HELP}\n", console=notes())
            elif word:
                self._answer(line)

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            text = self._print(messages)
        except RequestError as error:
            print_error(f"{error}. /reset starts a new conversation" if self._messages else error)
            return
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def _print(self, messages: Messages) -> str:
        """Print the answer as it is generated and return it; Ctrl-C keeps what has been generated so far."""
        text, refused = "", True
        try:
            with closing(self._model.answer(messages)) as pieces:
                for piece in pieces:
                    print_text(piece)
                    text += piece
            refused = False
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        finally:
            if text or not refused:
                print_text("\n")
        return text


def _read_line() -> str | None:
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    import readline  # noqa: F401 - gives input() editing and history

    try:
        return input("> ")
    except EOFError:
        print()
        return None
