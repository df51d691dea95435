"""Fields of vLLM over HTTP and in the SDK: logprobs of prompts, bad words, the best of several completions."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from openai.types import CompletionChoice
from transformers import PreTrainedModel

from lamina import Lamina, SamplingParams
from tests.support.http_server import openai_client
from tests.support.random_models import served, write_checkpoint

PROMPTS = [[5, 9, 2, 17, 33, 2, 8], [40, 41], [7]]
TEXT = "".join(chr(0x4E00 + token) for token in (5, 9, 17))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    place = tmp_path_factory.mktemp("llama")
    return place, write_checkpoint(served("llama", max_position_embeddings=64), place)


@pytest.fixture(scope="module")
def lamina(model: tuple[Path, PreTrainedModel]) -> Iterator[Lamina]:
    with Lamina(str(model[0]), compute="cpu:1", memory="cpu:1", dtype="float32") as made:
        yield made


@pytest.fixture(scope="module")
def client(lamina: Lamina) -> Iterator[openai.OpenAI]:
    with openai_client(lamina.engine) as made:
        yield made


def logprobs_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """By position, the log-probabilities of the next token by transformers, [T, V]."""
    with torch.no_grad():
        scores: torch.Tensor = model.float()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return scores


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


def test_prompt_logprobs_are_those_of_transformers(
    client: openai.OpenAI, lamina: Lamina, model: tuple[Path, PreTrainedModel]
) -> None:
    name = client.models.list().data[0].id
    extra = {"prompt_logprobs": 2, "return_token_ids": True, "ignore_eos": True}
    asked = {"model": name, "n": 2, "max_tokens": 3, "seed": 5, "extra_body": extra}
    answer = client.completions.create(prompt=PROMPTS, presence_penalty=1, **asked)
    assert answer.usage is not None and answer.usage.completion_tokens == 3 * 2 * len(PROMPTS)
    for place, choice in enumerate(answer.choices):
        prompt, found = PROMPTS[place // 2], choice.model_extra
        assert found is not None and found["prompt_token_ids"] == prompt and choice.logprobs is None
        first, *others = found["prompt_logprobs"]
        assert first is None and len(others) == len(prompt) - 1
        for position, (entry, scores) in enumerate(zip(others, logprobs_of(model[1], prompt), strict=False)):
            wanted = {*scores.topk(2).indices.tolist(), prompt[position + 1]}
            assert {int(token) for token in entry} == wanted
            for token, one in entry.items():
                assert one["logprob"] == pytest.approx(float(scores[int(token)]), rel=1e-4)
                assert one["rank"] == 1 + int((scores > scores[int(token)]).sum())
    # The same tokens are drawn as without: neither penalties nor draws see the prompt as drawn.
    del extra["prompt_logprobs"]
    plain = client.completions.create(prompt=PROMPTS, presence_penalty=1, **asked)
    for one, other in zip(answer.choices, plain.choices, strict=True):
        assert one.text == other.text
        assert (one.model_extra or {})["token_ids"] == (other.model_extra or {})["token_ids"]
        assert len((one.model_extra or {})["token_ids"]) == 3
    params = SamplingParams(prompt_logprobs=0, max_tokens=3, ignore_eos=True, seed=5, n=2, presence_penalty=1)
    for prompt, output in zip(PROMPTS, lamina.generate(PROMPTS, params), strict=True):
        first, *positions = output.prompt_logprobs or []
        assert first is None and [entries[0].token_id for entries in positions if entries] == prompt[1:]
        assert output.prompt_token_ids == prompt
        own = plain.choices[2 * PROMPTS.index(prompt)]
        assert output.outputs[0].token_ids == (own.model_extra or {})["token_ids"]


def test_a_chat_has_the_logprobs_and_ids_of_its_prompt(client: openai.OpenAI, lamina: Lamina) -> None:
    name = client.models.list().data[0].id
    extra = {"prompt_logprobs": 0, "return_token_ids": True, "ignore_eos": True, "chat_template_kwargs": {}}
    asked = {"model": name, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "temperature": 0}
    whole = client.chat.completions.create(**asked, extra_body=extra)
    of_prompt = whole.model_extra or {}
    ids = of_prompt["prompt_token_ids"]
    rendered = lamina.tokenizer.apply_chat_template(asked["messages"])
    assert ids == lamina.tokenizer.encode(rendered, add_special_tokens=False)
    assert [None if entry is None else [*entry] for entry in of_prompt["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in ids[1:]),
    ]
    del extra["prompt_logprobs"]
    drawn, begun = list[int](), list[list[int]]()
    for chunk in client.chat.completions.create(**asked, stream=True, extra_body=extra):
        begun += (
            [(chunk.model_extra or {})["prompt_token_ids"]] if "prompt_token_ids" in (chunk.model_extra or {}) else []
        )
        for choice in chunk.choices:
            drawn += (choice.model_extra or {}).get("token_ids") or []
    assert begun == [ids] and drawn == (whole.choices[0].model_extra or {})["token_ids"] and len(drawn) == 4


@pytest.mark.parametrize("most", [3, 1, 1000, -1])
def test_a_truncated_prompt_is_its_last_tokens(client: openai.OpenAI, lamina: Lamina, most: int) -> None:
    name = client.models.list().data[0].id
    text = TEXT * 40
    ids = lamina.tokenizer.encode(text)
    room = 64 - 4 if most in (-1, 1000) else most
    extra = {"truncate_prompt_tokens": most, "return_token_ids": True}
    asked = {"model": name, "max_tokens": 4, "temperature": 0, "extra_body": extra}
    if most == 1000:
        with pytest.raises(openai.BadRequestError, match=r"the prompt has \d+ tokens"):
            client.completions.create(prompt=text, **asked)
        return
    (choice,) = client.completions.create(prompt=text, **asked).choices
    assert (choice.model_extra or {})["prompt_token_ids"] == ids[-room:]
    messages = [{"role": "user", "content": text}]
    chat = client.chat.completions.create(messages=messages, **asked)
    rendered = lamina.tokenizer.encode(lamina.tokenizer.apply_chat_template(messages), add_special_tokens=False)
    assert (chat.model_extra or {})["prompt_token_ids"] == rendered[-room:]
    (output,) = lamina.generate(text, {"truncate_prompt_tokens": most, "max_tokens": 4, "temperature": 0})
    assert output.prompt_token_ids == ids[-room:]


def test_the_best_of_several_completions_are_returned(client: openai.OpenAI, lamina: Lamina) -> None:
    name = client.models.list().data[0].id
    asked = {"model": name, "prompt": PROMPTS[0], "seed": 3, "max_tokens": 6, "temperature": 2.0}
    every = client.completions.create(n=8, logprobs=0, **asked).choices

    def score(choice: CompletionChoice) -> float:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = sorted(every, key=score, reverse=True)
    assert best[0] is not every[0], "the first is the best by chance; take another seed"
    for stream in (False, True):
        got = ["", ""]
        answer = client.completions.create(n=2, best_of=8, stream=stream, **asked)
        for part in answer if stream else [answer]:
            for choice in part.choices:
                assert choice.logprobs is None
                got[choice.index] += choice.text
        assert got == [one.text for one in best[:2]]
    (output,) = lamina.generate([PROMPTS[0]], SamplingParams(best_of=8, n=2, seed=3, max_tokens=6, temperature=2.0))
    assert [one.text for one in output.outputs] == [one.text for one in best[:2]]


def test_bad_words_are_not_generated(
    client: openai.OpenAI, lamina: Lamina, model: tuple[Path, PreTrainedModel]
) -> None:
    name = client.models.list().data[0].id

    def drawn(words: list[str], **extra: object) -> list[int]:
        fields = {"bad_words": words, "return_token_ids": True, "ignore_eos": True, **extra}
        answer = client.completions.create(
            model=name, prompt=PROMPTS[0], max_tokens=12, temperature=0, extra_body=fields
        )
        ids: list[int] = (answer.choices[0].model_extra or {})["token_ids"]
        return ids

    free = drawn([])
    words = ["".join(lamina.tokenizer.token(token) or "" for token in part) for part in (free[1:2], free[4:6])]
    sequences = [lamina.tokenizer.encode(word, add_special_tokens=False) for word in words]
    assert sequences == [[free[1]], free[4:6]]
    expected = list[int]()
    for _ in range(12):
        scores = logprobs_of(model[1], PROMPTS[0] + expected)[-1]
        for *before, last in sequences:
            if expected[len(expected) - len(before) :] == before:
                scores[last] = -torch.inf
        expected.append(int(scores.argmax()))
    assert drawn(words) == expected != free
    assert drawn(words, prompt_logprobs=1) == expected
