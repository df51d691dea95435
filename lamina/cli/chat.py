"""`lamina chat`: a conversation in the terminal, or one message per line from a pipe."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli import options
from lamina.config import EngineConfig
from lamina.errors import EngineDeadError, RequestError
from lamina.types import SamplingParams

if TYPE_CHECKING:
    from lamina.sdk import Lamina

HELP = "/clear starts a new conversation, /exit quits; Ctrl-C stops an answer."


@options.engine_options
def chat(
    config: EngineConfig,
    system: Annotated[str | None, typer.Option(help="System message at the start of the conversation.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens per answer. Default: the model's, or the rest of its context.")
    ] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
) -> None:
    """Talk to a model. Reads one message per line; /exit or end of input quits."""
    params = options.sampling_params(config, max_tokens, temperature, top_p, seed)
    from lamina.cli.console import output
    from lamina.sdk import Lamina

    with Lamina.from_config(config) as lamina:
        if sys.stdin.isatty():
            output().print(f"[bold]{lamina.engine.model_name}[/]  [dim]{HELP}[/]", soft_wrap=True)
            if config.model is None:
                output().print(
                    "[dim]The bundled model only continues Python source; give --model DIR for a chat model.[/]"
                )
        _Conversation(lamina, params, system).run()


class _Conversation:
    def __init__(self, lamina: "Lamina", params: SamplingParams, system: str | None) -> None:
        self._lamina = lamina
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)

    def run(self) -> None:
        """Read and answer until /exit or the end of input."""
        while (line := _read_line()) is not None and line.strip() != "/exit":
            if line.strip() == "/clear":
                self._messages = list(self._start)
            elif line.strip():
                self._answer(line)

    def _answer(self, line: str) -> None:
        from lamina.cli.console import print_error

        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            text = self._stream(messages)
        except RequestError as error:
            print_error(f"{error}. /clear starts a new conversation" if self._messages else error)
            return
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def _stream(self, messages: list[dict[str, str]]) -> str:
        """Print the answer as it is generated and return it; Ctrl-C keeps what has been generated so far."""
        from lamina.cli.console import print_error, print_text
        from lamina.frontend.prompts import chat_prompt

        text = ""
        answer = self._lamina.stream(
            chat_prompt(self._lamina.tokenizer, messages, self._lamina.engine.max_model_len), self._params
        )
        try:
            for output in answer:
                print_text(output.outputs[0].text[len(text) :])
                text = output.outputs[0].text
                if output.error:
                    if self._lamina.engine.stats().dead is not None:  # nothing more can be answered
                        raise EngineDeadError(output.error)
                    print_error(output.error)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        finally:
            answer.close()
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
