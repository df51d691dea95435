"""Log-probabilities of prompts over HTTP, as evaluation harnesses read them, against transformers."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from transformers import PreTrainedModel

from lamina import Lamina
from lamina.serve.server import make_server
from tests.support.random_models import served, write_checkpoint

PROMPTS = [[5, 9, 2, 17, 33, 2, 8], [40, 41], [7]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    place = tmp_path_factory.mktemp("llama")
    return place, write_checkpoint(served("llama", max_position_embeddings=64), place)


@pytest.fixture(scope="module")
def client(model: tuple[Path, PreTrainedModel]) -> Iterator[openai.OpenAI]:
    with Lamina(str(model[0]), compute="cpu:1", memory="cpu:1", dtype="float32") as lamina:
        listener = socket.create_server(("127.0.0.1", 0))
        server = make_server(lamina.engine, lambda: None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
            yield made
        server.should_exit = server.force_exit = True
        thread.join(60)


def test_prompts_are_scored_as_by_transformers(client: openai.OpenAI, model: tuple[Path, PreTrainedModel]) -> None:
    name = client.models.list().data[0].id
    answer = client.completions.create(
        model=name, prompt=PROMPTS, echo=True, logprobs=3, max_tokens=2, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 6)
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
        found = choice.logprobs
        assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
        assert found.tokens is not None and found.text_offset is not None
        assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == len(prompt) + 2
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        run = list(prompt)
        for _ in range(2):
            with torch.no_grad():
                logits = model[1].float()(torch.tensor([run])).logits[0].log_softmax(-1)
            run.append(int(logits[-1].argmax()))
        expected = logits.gather(1, torch.tensor([run[1:]]).T)[:, 0].tolist()
        assert found.token_logprobs[1:] == pytest.approx(expected, rel=1e-4)
        for place, top in enumerate(found.top_logprobs[1:]):
            assert max(top.values()) == pytest.approx(logits[place].max().item(), rel=1e-4)
    first = answer.choices[1]
    assert first.text == "".join(first.logprobs.tokens or ()) if first.logprobs else False


def test_a_stream_scores_alike(client: openai.OpenAI) -> None:
    name = client.models.list().data[0].id
    asked = {"model": name, "prompt": PROMPTS[0], "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    whole = client.completions.create(**asked).choices[0]
    tokens, scores, text = [], [], ""
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.text
            tokens += choice.logprobs.tokens
            scores += choice.logprobs.token_logprobs
    assert (text, tokens, scores) == (whole.text, whole.logprobs.tokens, whole.logprobs.token_logprobs)


def test_a_prompt_without_room_is_refused(client: openai.OpenAI) -> None:
    name = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="the prompt has 64 tokens"):
        client.completions.create(model=name, prompt=[[5] * 64], echo=True, logprobs=1, max_tokens=1)
