"""`lamina chat`: a conversation in the terminal, or one message per line from a pipe."""

import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from lamina.cli import options
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError, EngineDeadError, RequestError
from lamina.core.types import SamplingParams

if TYPE_CHECKING:
    from lamina.sdk import Lamina

HELP = "/reset starts a new conversation, /exit quits, /help shows this; Ctrl-C stops an answer."

_COMMAND = re.compile(r"/[a-z]+")

Messages = Sequence[Mapping[str, str]]


class Model(Protocol):
    """What answers: an engine of this process, or a server."""

    name: str

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        """Yield the answer in pieces; closing the iterator cancels it. Raises RequestError if there is none."""
        ...


@options.engine_options
def chat(
    config: EngineConfig,
    url: Annotated[
        str | None, typer.Option(help="Talk to the server that runs there instead of starting an engine.")
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
        server = RemoteModel(url, {name: value for name, value in given.items() if value is not None})
        Conversation(server, system).run()
        return
    params = options.sampling_params(config, max_tokens, temperature, top_p, seed)
    from lamina.cli.console import output
    from lamina.sdk import Lamina

    with Lamina.from_config(config) as lamina:
        if sys.stdin.isatty() and config.model is None:
            output().print("[dim]The bundled model only continues Python source; give --model DIR for a chat model.[/]")
        Conversation(_Local(lamina, params), system).run()


class _Local:
    def __init__(self, lamina: "Lamina", params: SamplingParams) -> None:
        self.name = lamina.engine.model_name
        self._lamina, self._params = lamina, params

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        from lamina.text.prompts import chat_prompt

        engine, shown = self._lamina.engine, 0
        prompt = chat_prompt(self._lamina.tokenizer, messages, engine.max_model_len)
        with closing(self._lamina.stream(prompt, self._params)) as outputs:
            for output in outputs:
                text = output.outputs[0].text
                yield text[shown:]
                shown = len(text)
                if output.error:
                    dead = engine.stats().dead is not None  # nothing more can be answered
                    raise EngineDeadError(output.error) if dead else RequestError(output.error)


class Conversation:
    """The messages so far. ``system``: its first message."""

    def __init__(self, model: Model, system: str | None = None) -> None:
        self._model = model
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)

    def run(self) -> None:
        """Read and answer until /exit or the end of input."""
        from lamina.cli.console import notes, print_text

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
        from lamina.cli.console import print_error

        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            text = self._print(messages)
        except RequestError as error:
            print_error(f"{error}. /reset starts a new conversation" if self._messages else error)
            return
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def _print(self, messages: Messages) -> str:
        """Print the answer as it is generated and return it; Ctrl-C keeps what has been generated so far."""
        from lamina.cli.console import print_text

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
