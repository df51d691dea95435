"""Clients of other projects against the server, each where it is installed. openai's is in most other tests here."""

import importlib.util
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pydantic
import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.types import DType
from lamina.launch import launch
from lamina.models.directory import BUNDLED
from tests.support.http_server import openai_client
from tests.support.scripted_engine import Running, script, script_template
from tests.support.waiting import END_S

CALL = '<tool_call>{"name": "look", "arguments": {"city": "Rome"}}</tool_call>'
TOOLED = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


class City(pydantic.BaseModel):
    """Look at a city."""

    city: str


@pytest.fixture(autouse=True)
def template(monkeypatch: pytest.MonkeyPatch) -> None:
    script_template(monkeypatch, TOOLED)


def missing(package: str) -> str:
    return f"{package} is not installed: pip install {package}"


def test_anthropic(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    anthropic = pytest.importorskip("anthropic", reason=missing("anthropic"))
    client = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)
    asked: Any = {"model": "fake", "max_tokens": 40, "messages": [{"role": "user", "content": "a"}]}
    script(monkeypatch, "<think>So.</think>" + "Yes. " + CALL)
    tools = [{"name": "look", "input_schema": City.model_json_schema()}]
    with client.messages.stream(**asked, tools=tools) as stream:
        assert "".join(stream.text_stream).strip() == "Yes."
        streamed = stream.get_final_message()
    for answer in (client.messages.create(**asked, tools=tools), streamed):
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.content[2].input == {"city": "Rome"} and answer.stop_reason == "tool_use"
    assert client.messages.count_tokens(model="fake", messages=asked["messages"]).input_tokens == 1
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**asked, "max_tokens": 0})


def test_langchain(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=missing("langchain-openai"))
    model = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="-", model="fake", max_retries=0)
    script(monkeypatch, '{"city": "Rome"}')
    assert model.with_structured_output(City, method="json_schema").invoke("a") == City(city="Rome")
    assert model.with_structured_output(City, method="function_calling").invoke("a") == City(city="Rome")
    script(monkeypatch, CALL)
    (call,) = model.bind_tools([City]).invoke("a").tool_calls
    assert (call["name"], call["args"]) == ("look", {"city": "Rome"})
    assert "".join(chunk.content for chunk in model.stream("a")) == CALL


def test_litellm(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    litellm = pytest.importorskip("litellm", reason=missing("litellm"))
    asked: Any = {"messages": [{"role": "user", "content": "a"}], "api_base": f"{server.url}/v1", "api_key": "-"}
    script(monkeypatch, "Yes.")
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(model=f"{provider}/fake", **asked)
        assert answer.choices[0].message.content == "Yes." and answer.usage.completion_tokens == 1
        chunks = litellm.completion(model=f"{provider}/fake", stream=True, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Yes."


def test_llama_index(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like", reason=missing("llama-index-llms-openai-like"))
    model = like.OpenAILike(
        model="fake", api_base=f"{server.url}/v1", api_key="-", is_chat_model=True, is_function_calling_model=True
    )
    script(monkeypatch, "Yes.")
    assert str(model.complete("a")) == "Yes."
    assert "".join(chunk.delta or "" for chunk in model.stream_complete("a")) == "Yes."
    script(monkeypatch, json.dumps([{"name": "City", "parameters": {"city": "Rome"}}]))
    core = pytest.importorskip("llama_index.core")
    assert model.structured_predict(City, core.PromptTemplate("a")) == City(city="Rome")


SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "-", maxRetries: 0 });
const messages = [{ role: "user", content: "a" }];
const answer = await client.chat.completions.create({ model: "fake", messages });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model: "fake", messages, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
console.log(JSON.stringify([answer.choices[0].message.content, streamed]));
"""


def test_openai_of_npm(server: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where ``NODE_PATH`` has the package."""
    modules = Path(os.environ.get("NODE_PATH", ""))
    if shutil.which("node") is None or not (modules / "openai").is_dir():
        pytest.skip("NODE_PATH has no openai: npm install openai, and give the path of node_modules")
    script(monkeypatch, "Yes.")
    (tmp_path / "node_modules").symlink_to(modules.resolve())
    (tmp_path / "chat.mjs").write_text(SCRIPT)
    command = ["node", str(tmp_path / "chat.mjs"), f"{server.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["Yes.", "Yes."]


WORDS = [
    "import os",
    "def main(",
    "return self.",
    "for i in range(",
    "while True:",
    "else",
    "None",
    "raise ValueError(",
]
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["@"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path, count: int) -> None:
    """Write tasks for lm-evaluation-harness, and their ``count`` documents."""
    draw, documents = random.Random(5), folder / "documents.jsonl"
    lines = [f"{draw.choice(WORDS)} {draw.choice(WORDS)}\n    {draw.choice(WORDS)}" for _ in range(count)]
    asked = [{"text": line, "choices": draw.sample(WORDS, 4), "label": draw.randrange(4)} for line in lines]
    documents.write_text("\n".join(map(json.dumps, asked)))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(documents)}}, "test_split": "test"}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))  # JSON is YAML


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason=missing("lm_eval[api,hf]"))
def test_lm_evaluation_harness_finds_what_it_finds_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracies and generated text are equal, and log-likelihoods within 1e-4 relative."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    import lm_eval
    from lm_eval.tasks import TaskManager

    write_tasks(tmp_path, count=10)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def evaluate(backend: str, **arguments: Any) -> Any:
        return lm_eval.simple_evaluate(
            backend, arguments, list(TASKS), batch_size=4, task_manager=manager, bootstrap_iters=0
        )

    engine = launch(EngineConfig(dtype=DType.FLOAT32, kv_cache_memory_bytes=32 << 20))
    try:
        with openai_client(engine) as client:
            served = evaluate(
                "local-completions",
                model=engine.model_name,
                base_url=f"{client.base_url}completions",
                tokenizer=str(BUNDLED),
                num_concurrent=4,
                max_length=1024,
            )
    finally:
        engine.close()
    expected = evaluate("hf", pretrained=str(BUNDLED), dtype="float32", device="cpu")
    for name in TASKS:
        for mine, theirs in zip(served["samples"][name], expected["samples"][name], strict=True):
            assert mine["doc"] == theirs["doc"]
            if name == "generation":
                assert mine["filtered_resps"] == theirs["filtered_resps"] and mine["filtered_resps"] != [""]
            else:
                assert numbers(mine["resps"]) == pytest.approx(numbers(theirs["resps"]), rel=1e-4)
    for measure in ("acc,none", "acc_norm,none"):
        assert served["results"]["choice"][measure] == expected["results"]["choice"][measure]


def numbers(nested: Any) -> list[float]:
    """Return the numbers in nested lists and tuples, in order; whether a choice is greedy counts as a number."""
    return [float(nested)] if isinstance(nested, float | bool) else [n for part in nested for n in numbers(part)]
