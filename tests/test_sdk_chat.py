"""Chats of the SDK that end in objects and calls, and the SDK in event loops."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field, field_validator

from lamina import (
    AsyncLamina,
    FinishReason,
    Lamina,
    ModelError,
    RequestError,
    SamplingParams,
    StructuredOutputs,
    ToolCall,
)

SMALL: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_cache_memory_bytes": 32 * 2**20}
TEMPLATE = (
    "{% for t in tools or [] %}# {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if false %}<tool_call></tool_call>{% endif %}"
)
USER = [{"role": "user", "content": "the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]


class Step(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["add", "multiply"]


class Plan(BaseModel):
    steps: list[Step] = Field(min_length=1, max_length=2)
    total: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chat") / "template.jinja"
    place.write_text(TEMPLATE)
    return place


@pytest.fixture(scope="module")
def lamina(template: Path) -> Iterator[Lamina]:
    with Lamina(chat_template=str(template), **SMALL) as runtime:
        yield runtime


def test_answers_are_objects_of_the_model_that_describes_them(lamina: Lamina) -> None:
    params = SamplingParams(seed=4, max_tokens=400, n=3, temperature=1.2)
    outputs = lamina.chat([USER, USER], params, response_format=Plan)
    answers = [answer for output in outputs for answer in output.outputs]
    for answer in answers:
        assert answer.finish_reason is FinishReason.STOP and answer.content == answer.text
        assert isinstance(answer.parsed, Plan) and answer.parsed == Plan(**json.loads(answer.text))
    assert len({answer.text for answer in answers}) > 1
    (output,) = lamina.chat(USER, params, response_format=PARAMETERS)
    for answer in output.outputs:
        jsonschema.validate(answer.parsed, PARAMETERS)
    (output,) = lamina.chat(USER, {"seed": 4, "max_tokens": 3}, response_format=Plan)
    assert output.outputs[0].finish_reason is FinishReason.LENGTH and output.outputs[0].parsed is None


def test_calls_that_must_be_made_are_objects(lamina: Lamina) -> None:
    params = {"seed": 1, "max_tokens": 400, "n": 3}
    weather: Any = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [weather]}}
    for choice, tools in (("required", TOOLS[:1]), (weather, TOOLS[:1]), (allowed, TOOLS)):
        (output,) = lamina.chat(USER, params, tools=tools, tool_choice=choice)
        for answer in output.outputs:
            assert answer.finish_reason is FinishReason.STOP and answer.tool_calls and not answer.content
            for call in answer.tool_calls:
                assert call.name == "weather"
                jsonschema.validate(call.arguments, PARAMETERS)


def test_calls_are_found_in_the_form_of_the_template(lamina: Lamina) -> None:
    text = 'so <tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    forced = lamina.tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(forced_token_ids=forced, max_tokens=len(forced))
    for choice, calls in (("auto", [ToolCall("weather", {"city": "Bonn"})]), ("none", [])):
        (output,) = lamina.chat(USER, params, tools=TOOLS, tool_choice=choice)
        (answer,) = output.outputs
        assert answer.text == text and answer.tool_calls == calls
        assert answer.content.strip() == ("so" if calls else text)
        shown = lamina.tokenizer.decode(output.prompt_token_ids)
        assert ("# stop" in shown) is bool(calls)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": [{"type": "web"}]}, "tools or tool_choice: Invalid value 'web'"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tools or tool_choice: "),
        ({"tool_choice": "required"}, "there are no tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools: the parameters of 'f': cannot be compiled at #",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": Plan}, "tool_choice and response_format both"),
        (
            {"response_format": Plan, "sampling_params": {"structured_outputs": {"regex": "a"}}},
            "structured_outputs and the chat's tool_choice or response_format both",
        ),
        ({"response_format": {"not": {}}}, "json cannot be compiled at #"),
        ({"response_format": "json"}, "response_format: structured_outputs.json is not JSON"),
        ({"response_format": int}, "response_format: structured_outputs.json is no JSON schema"),
    ],
)
def test_chats_that_contradict_themselves_are_refused(lamina: Lamina, given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        lamina.chat(USER, **given)


class Picky(BaseModel):
    text: str = Field(max_length=1)

    @field_validator("text")
    @classmethod
    def refuse(cls, text: str) -> str:
        raise ValueError("never")


def test_an_answer_that_cannot_be_an_object_ends_no_other_chat(lamina: Lamina) -> None:
    (output,) = lamina.chat(USER, {"max_tokens": 100, "temperature": 0.0}, response_format=Picky)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].content and output.outputs[0].parsed is None
    (output,) = lamina.chat(USER, {"max_tokens": 100, "stop": ["{"]}, response_format=Picky)
    assert output.outputs[0].parsed is None


def test_a_format_may_have_the_form_of_openai_s_api(lamina: Lamina) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert lamina.chat(USER, {"max_tokens": 60}, response_format=wanted)[0].outputs[0].parsed == {"a": 1}
    params = lamina._chats(USER, None, None, "auto", {"type": "json_object"})[1]
    assert params[0].structured_outputs == StructuredOutputs(json_object=True)


async def test_requests_of_several_tasks_run_together_in_a_running_loop(lamina: Lamina, template: Path) -> None:
    params = {"temperature": 0.0, "max_tokens": 8}
    prompts = ["def fibonacci(n):", "import os"]
    expected = [output.outputs[0].text for output in lamina.generate(prompts, params)]

    async def last(running: AsyncLamina, prompt: str) -> str:
        lengths, text = list[int](), ""
        async for output in running.generate(prompt, params):
            lengths.append(len(output.outputs[0].token_ids))
            text = output.outputs[0].text
        assert lengths == sorted(lengths) and lengths[-1] == 8
        return text

    running = AsyncLamina(chat_template=str(template), **SMALL)
    try:
        assert await asyncio.gather(*(last(running, prompt) for prompt in prompts)) == expected
        whole, objects = await asyncio.gather(
            running.chat([USER], params), running.chat(USER, {"seed": 4, "max_tokens": 400}, response_format=Plan)
        )
        assert whole[0].outputs[0].text == lamina.chat(USER, params)[0].outputs[0].text
        assert isinstance(objects[0].outputs[0].parsed, Plan)
        async for _ in running.generate(prompts[0], {"max_tokens": 900, "ignore_eos": True}):
            break
        engine = (await running.start()).engine
        async with asyncio.timeout(20):
            while engine.stats().running:  # a stream that is left cancels its request
                await asyncio.sleep(0.02)
    finally:
        await running.close()
        await running.close()


async def test_a_model_that_cannot_start_is_an_error_of_the_first_request() -> None:
    running = AsyncLamina("/nowhere", **SMALL)
    for _ in range(2):
        with pytest.raises(ModelError, match="/nowhere"):
            async for _ in running.generate("a"):
                pass
    await running.close()


def test_a_session_with_a_running_loop_needs_no_main_guard() -> None:
    """Run statements as a notebook does: they arrive one after another, with ``await`` at the top level."""
    session = """
from lamina import AsyncLamina, Lamina
running = AsyncLamina(dtype="float32", threads=1)
(await running.chat([{"role": "user", "content": "a"}], {"temperature": 0.0, "max_tokens": 4}))[0].finished
await running.close()
lamina = Lamina(dtype="float32", threads=1)
len(lamina.generate("a", {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True})[0].outputs[0].token_ids)
lamina.close()
"""
    run = subprocess.run(
        [sys.executable, "-m", "asyncio"], input=session, capture_output=True, text=True, timeout=120, check=True
    )
    assert "Traceback" not in run.stderr, run.stderr
    assert [line for line in run.stdout.replace(">>> ", "").splitlines() if line] == ["True", "4"], run.stdout
