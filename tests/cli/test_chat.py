"""`lamina chat`: what a conversation remembers, and the prompt of each message."""

import io
from collections.abc import Generator
from types import SimpleNamespace

import pytest

from lamina.cli.chat import _Conversation
from lamina.errors import RequestError
from lamina.types import CompletionOutput, RequestOutput, SamplingParams


class FakeTokenizer:
    most_bytes_per_token = None

    def apply_chat_template(self, messages: list[dict[str, str]], tools: object = None) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]


class FakeLamina:
    """Answers "yes"; refuses conversations of more than 40 characters."""

    tokenizer = FakeTokenizer()
    engine = SimpleNamespace(model_name="fake", max_model_len=64)

    def __init__(self) -> None:
        self.asked: list[str] = []

    def stream(self, prompt: list[int], params: SamplingParams) -> Generator[RequestOutput, None, None]:
        self.asked.append("".join(map(chr, prompt)))
        if len(prompt) > 40:
            raise RequestError(f"the prompt has {len(prompt)} tokens")
        for text in ("y", "yes"):
            yield RequestOutput("r", None, prompt, [CompletionOutput(0, text)], finished=text == "yes")


def converse(monkeypatch: pytest.MonkeyPatch, lines: str, system: str | None = None) -> list[str]:
    lamina = FakeLamina()
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    _Conversation(lamina, SamplingParams(), system).run()  # type: ignore[arg-type]
    return lamina.asked


def test_each_message_brings_what_was_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, "a\n\nb\n/exit\nc\n") == ["<user>a", "<user>a<assistant>yes<user>b"]


def test_clear_keeps_only_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, "a\n/clear\nb", "s") == ["<system>s<user>a", "<system>s<user>b"]


def test_a_refused_message_is_forgotten(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = converse(monkeypatch, f"a\n{'long' * 20}\nb\n")
    assert asked[2] == "<user>a<assistant>yes<user>b"
    assert "error: the prompt has" in capsys.readouterr().err
