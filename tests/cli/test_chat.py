"""`lamina chat`: what a conversation remembers, its commands, and answers of an engine or a server."""

import io
from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.cli.client import RemoteModel
from lamina.cli.generate import HELP, Conversation, _Local
from lamina.core.errors import ConfigError, EngineDeadError, RequestError, TransportError
from lamina.core.outputs import CompletionOutput, RequestOutput
from lamina.core.sampling import SamplingParams
from tests.support.commands import assert_refused, run_here
from tests.support.http_server import serve


class FakeTokenizer:
    most_bytes_per_token = None

    def apply_chat_template(self, messages: list[dict[str, str]], tools: object = None) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]


class FakeLamina:
    """Answers "yes"; refuses conversations of more than 40 characters, and fails those that end in "break"."""

    tokenizer = FakeTokenizer()

    def __init__(self, dead: str | None = None) -> None:
        self.asked: list[str] = []
        stats = SimpleNamespace(dead=dead)
        self.engine = SimpleNamespace(model_name="fake", max_model_len=64, stats=lambda: stats)

    def stream(self, prompt: list[int], params: SamplingParams) -> Generator[RequestOutput, None, None]:
        self.asked.append("".join(map(chr, prompt)))
        if len(prompt) > 40:
            raise RequestError(f"the prompt has {len(prompt)} tokens")
        failed = "worker memory0 is gone" if self.asked[-1].endswith("break") else None
        for text in ("y", "yes"):
            done = text == "yes"
            yield RequestOutput(
                "r", None, prompt, [CompletionOutput(0, text)], finished=done, error=failed if done else None
            )


def converse(
    monkeypatch: pytest.MonkeyPatch, lines: str, system: str | None = None, dead: str | None = None
) -> list[str]:
    lamina = FakeLamina(dead)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    Conversation(_Local(lamina, SamplingParams()), system).converse()  # type: ignore[arg-type]
    return lamina.asked


def test_each_message_brings_what_was_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, "a\n\nb\n/exit\nc\n") == ["<user>a", "<user>a<assistant>yes<user>b"]


def test_reset_keeps_only_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, "a\n/reset\nb", "s") == ["<system>s<user>a", "<system>s<user>b"]


def test_commands_never_reach_the_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert converse(monkeypatch, "/help\n/clear\n/etc/x is what?\n") == ["<user>/etc/x is what?"]
    said = capsys.readouterr().err
    assert said == f"{HELP}\nThere is no command /clear. {HELP}\n"
    assert all(command in HELP for command in ("/reset", "/exit", "/help"))


def test_a_refused_message_is_forgotten(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = converse(monkeypatch, f"a\n{'long' * 20}\nb\n")
    assert asked[2] == "<user>a<assistant>yes<user>b"
    assert "error: the prompt has" in capsys.readouterr().err


def test_a_failed_answer_is_told_and_a_dead_engine_ends_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(monkeypatch, "break\nb\n") == ["<user>break", "<user>b"]
    printed = capsys.readouterr()
    assert printed.out == "yes\nyes\n" and printed.err == "error: worker memory0 is gone\n"
    with pytest.raises(EngineDeadError, match="memory0 is gone"):
        converse(monkeypatch, "break\nb\n", dead="no memory worker is left")


def text_of(server: RemoteModel, messages: Sequence[Any]) -> str:
    return "".join(server.answer(messages))


def test_a_server_answers_and_refuses_like_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve() as running:
        server = RemoteModel(f"{running.url}/v1/", {"max_tokens": 5, "temperature": 0.0, "seed": 3})
        assert server.name == "fake"
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\nbreak\nagain\n"))
        Conversation(server, "s").converse()
        printed = capsys.readouterr()
        assert printed.out.splitlines()[0] == printed.out.splitlines()[-1] == " one two three"
        assert "error: " in printed.err and "worker memory0 is gone" in printed.err
        prompts = [prompt for prompt, _ in running.engine.submitted]
        asked = [prompt if isinstance(prompt, str) else "".join(map(chr, prompt)) for prompt in prompts]
        assert asked[-1] == "<system>s<user>hello<assistant> one two three<user>again"
        _, params = running.engine.submitted[-1]
        assert (params.max_tokens, params.temperature, params.seed) == (5, 0.0, 3)
        with pytest.raises(RequestError, match="tokens"):
            text_of(server, [{"role": "user", "content": "x" * 500}])
        with pytest.raises(ConfigError, match="has no OpenAI-compatible API"):
            RemoteModel(f"{running.url}/elsewhere", {})
    with pytest.raises(TransportError, match="no server answers at"):
        text_of(server, [{"role": "user", "content": "x"}])


def test_a_url_leaves_no_room_for_an_engine_s_settings() -> None:
    assert_refused(run_here("chat", "--url", "http://127.0.0.1:1", "--memory", "cpu:2"), "leave out those of an engine")
    assert_refused(run_here("chat", "--url", "127.0.0.1:1"), "is not the URL of a server")
    assert_refused(run_here("chat", "--url", "http://127.0.0.1:1"), "no server answers at", status=1)
