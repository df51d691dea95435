"""Tokenizer and incremental detokenisation against transformers and against the whole decode."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lamina.core.errors import ModelError, RequestError
from lamina.core.types import ChatSettings
from lamina.models.directory import ModelDirectory, find
from lamina.text.chat_template import DEFAULT_TEMPLATE
from lamina.text.detokenizer import IncrementalDetokenizer
from lamina.text.tokenizer import Tokenizer
from tests.models.small_tokenizers import CORPUS, KINDS, byte_level, save

TEXTS = [
    "",
    " ",
    "Hello world",
    " leading",
    "trailing ",
    "a\n\n  b\tc",
    "😀 naïve 你好 👩‍👩‍👧",
    "\u200d\ufffd x",
    "<s> </s>",
]
INVALID = [b"\xff" * 9, b"\x80" * 9, b"\xe2\x82" * 5, b"\xf0\x9f\x98", "é".encode() * 5, "🦜".encode(), b"\xed\xa0\x80"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelDirectory]:
    found = {kind: save(tmp_path_factory.mktemp(kind), make()) for kind, make in KINDS.items()}
    return found | {"bundled": find(None)}


@pytest.fixture(scope="module")
def ours(directories: dict[str, ModelDirectory]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer(directory) for kind, directory in directories.items()}


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
def test_encodes_and_decodes_as_transformers(
    kind: str, directories: dict[str, ModelDirectory], ours: dict[str, Tokenizer]
) -> None:
    theirs = AutoTokenizer.from_pretrained(directories[kind].path)
    assert ours[kind].eos_token_ids == {theirs.eos_token_id}
    for text in TEXTS + CORPUS[:3]:
        ids = ours[kind].encode(text)
        assert ids == theirs.encode(text)
        assert ours[kind].encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours[kind].decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def token_of(tokenizer: Tokenizer, name: str) -> int:
    token = tokenizer._tokenizer.token_to_id(name)
    assert token is not None
    return token


def pieces(tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int]) -> list[str]:
    """Texts handed out when ``ids`` arrive in steps of ``sizes`` (in turn), and then the rest."""
    detokenizer, out, at, turn = IncrementalDetokenizer(tokenizer, prompt), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        out.append(detokenizer.append(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*out, detokenizer.flush()]


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "bundled", "crossing"])
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_the_whole(kind: str, ours: dict[str, Tokenizer], data: st.DataObject) -> None:
    tokenizer = ours[kind]
    # An embedding may have rows beyond the vocabulary.
    token = st.integers(0, tokenizer._tokenizer.get_vocab_size() + 5)
    prompt = data.draw(st.lists(token, max_size=30))
    ids = data.draw(st.lists(token, max_size=60))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    before = len(tokenizer.decode(prompt).removesuffix("\ufffd"))  # the completion may complete a character
    assert "".join(pieces(tokenizer, prompt, ids, sizes)) == tokenizer.decode(prompt + ids)[before:]


@pytest.mark.parametrize("kind", ["byte_level", "crossing", "bundled"])
@given(prompt=st.text("a é", max_size=3), parts=st.lists(st.binary(max_size=4) | st.sampled_from(INVALID), max_size=40))
def test_any_bytes_join_to_the_whole(kind: str, ours: dict[str, Tokenizer], prompt: str, parts: list[bytes]) -> None:
    tokenizer, spelt = ours[kind], dict(zip(*byte_alphabet(), strict=True))
    letters = "".join(spelt[byte] for part in parts for byte in part)
    ids = [token_of(tokenizer, letter) for letter in letters]
    before = tokenizer.encode(prompt)
    start = len(tokenizer.decode(before))
    assert "".join(pieces(tokenizer, before, ids, [1])) == tokenizer.decode(before + ids)[start:]
    assert tokenizer.decode(ids) == b"".join(parts).decode(errors="replace")


@given(
    prompt=st.text("a é", min_size=1, max_size=3),
    parts=st.lists(st.binary(max_size=4) | st.sampled_from(INVALID) | st.text("ab ▁é😀", max_size=3), max_size=30),
)
def test_byte_fallback_hands_out_characters_up_to_the_first_invalid_byte_of_a_run(
    ours: dict[str, Tokenizer], prompt: str, parts: list[bytes | str]
) -> None:
    """The whole, were the bytes from the first invalid one to the end of their run replacement characters' own."""
    tokenizer = ours["byte_fallback"]

    def of_bytes(data: bytes) -> list[int]:
        return [token_of(tokenizer, f"<0x{byte:02X}>") for byte in data]

    given = [
        token
        for part in parts
        for token in (of_bytes(part) if isinstance(part, bytes) else tokenizer.encode(part, add_special_tokens=False))
    ]
    replaced: list[int] = []
    for is_byte, run in itertools.groupby(given, lambda token: tokenizer.byte_of(token) is not None):
        tokens = list(run)
        if not is_byte:
            replaced += tokens
            continue
        data = bytes(tokenizer.byte_of(token) or 0 for token in tokens)
        valid = max(size for size in range(len(data) + 1) if is_utf8(data[:size]))
        replaced += of_bytes(data[:valid]) + of_bytes("\ufffd".encode()) * (len(data) - valid)
    before = tokenizer.encode(prompt) + tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.decode(before + replaced)[len(tokenizer.decode(before)) :]
    assert "".join(pieces(tokenizer, before, given, [1])) == whole
    if replaced == given:
        assert whole == tokenizer.decode(before + given)[len(tokenizer.decode(before)) :]


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def byte_alphabet() -> tuple[list[int], list[str]]:
    """Every byte with the letter that byte-level tokenizers write for it (GPT-2's table)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return kept + others, [chr(byte) for byte in kept] + [chr(256 + n) for n in range(len(others))]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("byte_level", ["\u00ff"]),  # FF, never part of a character
        ("byte_level", ["\u0122"]),  # 80, a continuation of nothing
        ("byte_level", ["\u00e2"]),  # E2, begun again and again
        ("crossing", ["\u00a9\u00c3"]),  # every token completes a character and begins the next
        ("byte_fallback", ["<0xFF>"]),
        ("byte_fallback", ["<0xC3>", "<0xA9>"]),
    ],
)
def test_a_token_costs_the_same_however_many_completed_no_character(
    kind: str, names: list[str], ours: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, sizes = ours[kind], list[int]()
    ids = [token_of(tokenizer, name) for name in names] * 500
    decode = tokenizer.decode

    def counted(given: list[int], skip_special_tokens: bool = True) -> str:
        sizes.append(len(given))
        return decode(given)

    monkeypatch.setattr(tokenizer, "decode", counted)
    prompt = tokenizer.encode("say") + ids  # prompts of such tokens are no dearer
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    text = "".join([detokenizer.append([token]) for token in ids] + [detokenizer.flush()])
    assert text[-400:] == decode(prompt + ids)[-400:]
    assert max(sizes) <= 20 and len(sizes) <= 3 * (len(ids) + 20)


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20),
    text=st.text(st.sampled_from("ab ▁\n😀👩‍👧é你, "), max_size=40),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_pieces_of_a_text_never_show_half_a_character(
    kind: str, ours: dict[str, Tokenizer], prompt: str, text: str, sizes: list[int]
) -> None:
    tokenizer = ours[kind]
    before, ids = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
    out = pieces(tokenizer, before, ids, sizes)
    assert not any("\ufffd" in piece for piece in out)
    assert "".join(out) == tokenizer.decode(before + ids)[len(tokenizer.decode(before)) :]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "bundled"])
def test_an_emoji_split_over_tokens_comes_out_once_and_whole(kind: str, ours: dict[str, Tokenizer]) -> None:
    tokenizer = ours[kind]
    prompt, ids = tokenizer.encode("say"), tokenizer.encode(" 🦜!", add_special_tokens=False)
    assert len(ids) >= 5
    out = pieces(tokenizer, prompt, ids, [1])
    assert "".join(out) == tokenizer.decode(prompt + ids)[len("say") :]
    assert [piece for piece in out if "🦜" in piece] and out[-1] == ""


def test_special_tokens_separate_nothing_and_cost_nothing(ours: dict[str, Tokenizer]) -> None:
    tokenizer = ours["unigram"]
    hello, eos = tokenizer.encode("Hello"), [2] * 500
    detokenizer = IncrementalDetokenizer(tokenizer, hello + eos)
    assert detokenizer.append(tokenizer.encode("world")) == " world"
    assert detokenizer.append(eos) == ""
    assert len(detokenizer._window) < 50
    assert detokenizer.append(tokenizer.encode("world")) == " world"


def test_unfinished_bytes_are_flushed(ours: dict[str, Tokenizer]) -> None:
    tokenizer = ours["byte_level"]
    ids = tokenizer.encode("🦜")[:-1]
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("say "))
    assert [detokenizer.append([token]) for token in ids] == [""] * len(ids)
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


CHATML = (
    "{%- for message in messages %}\n    {%- if loop.first and message.role == 'system' %}{{ bos_token }}{% endif %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' }}{% generation %}{{ message.content | trim }}{% endgeneration %}"
    "{{ '<|im_end|>\\n' }}{% if message.name is defined %}{{ {'n': message.name} | tojson(indent=2) }}{% endif %}"
    "{%- if message.role == 'skip' %}{% continue %}{% endif %}\n{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}{{ eos_token }}{{ tools is none }}"
)
INDENTED = """{% for message in messages %}
    {% if message.role == 'user' %}
        {{ message.content }}
    {% endif %}
{% endfor %}
"""
MESSAGES = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": " What is 1 + 1? ", "name": "Zoë"},
    {"role": "assistant", "content": "2\n"},
    {"role": "skip", "content": "x"},
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, INDENTED, DEFAULT_TEMPLATE])
def test_chat_template_renders_as_transformers(tmp_path: Path, template: str, add_generation_prompt: bool) -> None:
    directory = save(tmp_path, byte_level(), chat_template=template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert Tokenizer(directory).apply_chat_template(MESSAGES, add_generation_prompt) == expected


def test_a_model_without_a_template_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level()))
    for _ in range(2):
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "user: x\nassistant:"
    assert caplog.text.count("has no chat template") == 1
    with pytest.raises(RequestError, match="messages is a text; give a list"):
        tokenizer.apply_chat_template("x")  # type: ignore[arg-type]


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
]


def test_tools_are_rendered_as_transformers_does(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    directory = save(tmp_path, byte_level(), chat_template=template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for tools in (TOOLS, None, []):
        expected = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
        assert Tokenizer(directory).apply_chat_template(MESSAGES, tools=tools) == expected


# The parts of real templates that concern tool calls.
ITERATES = (  # as Qwen3-Coder's and GLM's
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% if m.tool_calls %}{% for call in m.tool_calls %}"
    "{{ call.function.name }}({% for k, v in call.function.arguments|items %}{{ k }}={{ v }};{% endfor %})"
    "{% endfor %}{% endif %}{% endfor %}"
)
AS_JSON = (  # as Llama 3.1's, which refuses more or fewer calls than one
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls|length != 1 %}"
    "{{ raise_exception('only single tool-calls') }}{% endif %}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
TESTS_NONE = (  # as DeepSeek's and Mistral's
    "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls is not none %}"
    "{% if m['content'] is none %}none{% else %}{{ m['content'] }}{% endif %}"
    "{{ m.tool_calls[0]['function'] | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CALLS = '{"a": 1, "path": "x/\\u00e9"}'


def history(arguments: object, content: str | None, calls: bool = True) -> list[dict]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content} | ({"tool_calls": [call]} if calls else {}),
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]


@pytest.mark.parametrize("content", [None, "text"])
@pytest.mark.parametrize("template", [ITERATES, AS_JSON, TESTS_NONE])
def test_earlier_tool_calls_render_as_with_transformers(tmp_path: Path, template: str, content: str | None) -> None:
    """Clients send arguments as text; transformers wants them as objects."""
    directory = save(tmp_path, byte_level(), chat_template=template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(history(json.loads(CALLS), content), tokenize=False)
    ours = Tokenizer(directory)
    assert ours.apply_chat_template(history(CALLS, content), False) == expected
    assert ours.apply_chat_template(history(json.loads(CALLS), content), False) == expected
    with_nulls = [message | {"refusal": None, "function_call": None} for message in history(CALLS, content)]
    assert ours.apply_chat_template(with_nulls, False) == expected


@pytest.mark.parametrize("template", [ITERATES, AS_JSON, TESTS_NONE])
@pytest.mark.parametrize("none", [{"tool_calls": []}, {"tool_calls": None}, {}])
@pytest.mark.parametrize("content", [None, "text"])
def test_no_tool_calls_render_as_a_message_without_them(
    tmp_path: Path, template: str, none: dict, content: str | None
) -> None:
    directory = save(tmp_path, byte_level(), chat_template=template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    plain = history("", content or "", calls=False)
    given = [plain[0], plain[1] | {"content": content} | none, plain[2]]
    expected = theirs.apply_chat_template(plain, tokenize=False)
    assert Tokenizer(directory).apply_chat_template(given, False) == expected


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        ("{{ messages[1].tool_calls[0].function.arguments + '!' }}", CALLS, CALLS + "!"),  # as DeepSeek-R1's
        ("{{ messages[1].tool_calls[0].function.arguments + '!' }}", {"a": "\u00e9"}, '{"a": "\u00e9"}!'),
        ("{% if '</think>' in messages[1].content %}{% endif %}{{ messages[1].tool_calls|length }}", CALLS, "1"),
        ("{{ messages[1].tool_calls[0].function.arguments | tojson }}", "", "{}"),
        ("{{ messages[1].tool_calls[0].function.arguments | tojson }}", None, "{}"),
        ("{{ messages[1].tool_calls[0].function.arguments }}", '{"a": ', '{"a": '),  # a model may write what is no JSON
        ("{{ messages[1].tool_calls[0].function.arguments }}", "[" * 100_000, "[" * 100_000),
    ],
)
def test_no_tool_call_ends_a_conversation(tmp_path: Path, template: str, arguments: object, expected: str) -> None:
    directory = save(tmp_path, byte_level(), chat_template=template)
    assert Tokenizer(directory).apply_chat_template(history(arguments, None), False) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_as_with_transformers(tmp_path: Path, name: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}{% endfor %}"
    directory = save(tmp_path, byte_level(), chat_template=template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "assistant", "content": "a", name: "because"}, {"role": "user", "content": "b"}]
    expected = theirs.apply_chat_template(messages, tokenize=False)
    assert Tokenizer(directory).apply_chat_template(messages, False) == expected


def test_bundled_chat_template_renders_as_transformers(ours: dict[str, Tokenizer]) -> None:
    theirs = AutoTokenizer.from_pretrained(find(None).path)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours["bundled"].apply_chat_template(MESSAGES) == expected


NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token")


@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": None}, None),
        ({}, {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False, "rstrip": False}}),
        ({"bos_token": "<s>", "unk_token": "<unk>"}, {"bos_token": "<unk>"}),
        ({"added_tokens_decoder": {"1": {"content": "<s>", "special": True}}}, {"bos_token": "<s>"}),
        ({"bos_token": "<s>", "extra_special_tokens": {"image_token": "<unk>"}}, None),
    ],
)
def test_templates_get_the_special_tokens_that_transformers_gives_them(
    tmp_path: Path, config: dict[str, Any], special: dict[str, Any] | None
) -> None:
    template = "".join(f"{name}={{{{ {name} }}}};" for name in NAMES)
    directory = save(tmp_path, byte_level())
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    if special is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    theirs, messages = AutoTokenizer.from_pretrained(tmp_path), [{"role": "user", "content": "x"}]
    ours = Tokenizer(directory)
    assert ours.apply_chat_template(messages, False) == theirs.apply_chat_template(messages, tokenize=False)
    assert ours.eos_token_ids >= ({theirs.eos_token_id} if theirs.eos_token_id is not None else set())
    bare = theirs.apply_chat_template(messages, tokenize=False, bos_token="")
    assert ours.apply_chat_template(messages, False, variables={"bos_token": ""}) == bare


NAMED = {"default": "plain", "tool_use": "{{ tools[0].function.name }}", "rag": "no"}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


def write_templates(path: Path, form: str, templates: dict[str, str]) -> None:
    """Write named templates in one of the three forms that transformers reads."""
    if form == "config":
        config = json.loads((path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        return
    (path / "additional_chat_templates").mkdir()
    for name, text in templates.items():
        alone = form == "files" and name == "default"
        file = path / "chat_template.jinja" if alone else path / "additional_chat_templates" / f"{name}.jinja"
        file.write_text(text)


@pytest.mark.parametrize("form", ["config", "files", "folder"])
def test_of_several_templates_the_one_for_tools_is_used_with_tools(tmp_path: Path, form: str) -> None:
    directory = save(tmp_path, byte_level())
    write_templates(tmp_path, form, NAMED)
    theirs, messages = AutoTokenizer.from_pretrained(tmp_path), [{"role": "user", "content": "x"}]
    ours = Tokenizer(directory)
    for tools in (None, [TOOL]):
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert ours.apply_chat_template(messages, tools=tools) == expected == ("f" if tools else "plain")


@pytest.mark.parametrize("form", ["config", "folder"])
def test_several_templates_without_a_default_are_an_error(tmp_path: Path, form: str) -> None:
    directory = save(tmp_path, byte_level())
    write_templates(tmp_path, form, {"rag": "no", "tool_use": "yes"})
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="no default"):
        AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    with pytest.raises(
        RequestError, match="named rag, tool_use, but none named default; give one with --chat-template"
    ):
        Tokenizer(directory).apply_chat_template(messages)
    given = Tokenizer(directory, ChatSettings(template="given"))
    assert given.apply_chat_template(messages) == "given"


def test_without_a_template_the_plain_one_is_used(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level()))
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == "user: Hello\nthere\nassistant:"


PARTS = {
    "gemma": "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}",
    "glm": "{% macro visible(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}"
    "{{ item.text if item is mapping else item }}{% endfor %}{% endif %}{% endmacro %}{{ visible(message.content) }}",
    "lists alone": "{% for part in message.content | selectattr('type', 'equalto', 'text') %}"
    "<{{ part.text }}>{% endfor %}",
}
"""Templates of a message that read lists of parts, as those of these families do."""


@pytest.mark.parametrize("name", PARTS)
def test_templates_that_read_parts_get_them_as_transformers_gives_them(tmp_path: Path, name: str) -> None:
    template = "{% for message in messages %}[" + PARTS[name] + "]{% endfor %}"
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for count in (1, 2, 3):
        parts = [{"type": "text", "text": f" {n}x "} for n in range(count)]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": parts[:1]},
        ]
        expected = theirs.apply_chat_template(messages, tokenize=False)
        assert tokenizer.apply_chat_template(messages, False) == expected
        mixed = [{"role": "user", "content": "0x"}, *messages]
        shown = "[<0x>]" if name == "lists alone" else "[0x]"  # transformers would give the template the characters
        assert tokenizer.apply_chat_template(mixed, False) == shown + expected


@pytest.mark.parametrize("template", [CHATML, "{% for message in messages %}[" + PARTS["glm"] + "]{% endfor %}"])
def test_refusals_and_texts_of_the_responses_api_are_texts(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    plain, other = (
        tokenizer.apply_chat_template([{"role": "assistant", "content": content}])
        for content in (
            [{"type": "text", "text": text} for text in "abc"],
            [
                {"type": "input_text", "text": "a"},
                {"type": "output_text", "text": "b"},
                {"type": "refusal", "refusal": "c"},
            ],
        )
    )
    assert plain == other


@pytest.mark.parametrize("stripping", ["", " | trim"])
@pytest.mark.parametrize("content", ["<", "end", "m", "I am", " a b ", "a\n", "user", "é\n\n"])
def test_the_last_message_is_continued_as_by_transformers(tmp_path: Path, content: str, stripping: str) -> None:
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
        + stripping
        + " }}<|im_end|>\n{% endfor %}"
    )
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert tokenizer.apply_chat_template(messages, False, None, None, True) == expected


def test_a_message_with_calls_is_continued_by_templates_that_join_their_arguments(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}[{{ message.content }}{% for call in message.tool_calls or [] %}"
        "{{ call.function.name + call.function.arguments }}{% endfor %}]{% endfor %}"
    )
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "So"},
    ]
    assert tokenizer.apply_chat_template(messages, False, None, None, True) == '[f{"a": 1}][So'


@pytest.mark.parametrize(
    "template", ["{% set n = namespace(__class__=1) %}", "{% set n = namespace() %}{% set n._a = 1 %}"]
)
def test_namespaces_have_no_names_that_python_reads(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(RequestError, match="namespace has no attribute"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_namespaces_and_dicts_work(tmp_path: Path) -> None:
    template = (
        "{% set n = namespace(self=1, b=2) %}{% set n.c = 3 %}{{ n.self }}{{ n.b }}{{ n.c }}{{ dict(a=4).a }}"
        "{{ dict.fromkeys(['x'], 5).x }}"
    )
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "12345"


def test_the_last_message_with_parts_is_continued(tmp_path: Path) -> None:
    template = "{% for message in messages %}[" + PARTS["glm"] + "]{% endfor %}"
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}], False, None, None, True) == "[ab"


@pytest.mark.parametrize(
    ("messages", "template", "fact"),
    [
        ([], CHATML, "messages is empty"),
        (["hi"], CHATML, r"messages\[0\] is 'hi'"),
        ([{"content": "hi"}], CHATML, r"messages\[0\] .* string role"),
        ([{"role": "user"}], CHATML, r"messages\[0\] has no content"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}], CHATML, r"messages\[0\].tool_calls is"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], CHATML, r"messages\[0\].tool_calls is not a list"),
        ([{"role": "user", "content": 3}], CHATML, r"messages\[0\].content is a int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], CHATML, "content part of type 'image_url'"),
        (MESSAGES, "{% for %}", "not valid Jinja"),
        (MESSAGES, "{{ raise_exception('no system role') }}", "no system role"),
        (MESSAGES, "{{ ''.__class__.__mro__ }}", "unsafe"),
        (MESSAGES, "{{ messages.append(1) }}", "not safely callable|unsafe"),
        (MESSAGES, "{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_chat_errors_are_request_errors(tmp_path: Path, messages: list, template: str, fact: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(RequestError, match=fact):
        tokenizer.apply_chat_template(messages)


def test_special_tokens_are_those_of_the_tokenizers_template(tmp_path: Path) -> None:
    directory = save(tmp_path, byte_level(), add_bos_token=True, add_eos_token=True)
    ids = AutoTokenizer.from_pretrained(tmp_path).encode("Hello")
    assert ids[0] == 1 and ids[-1] == 2
    assert Tokenizer(directory).encode("Hello") == ids


def test_truncation_stored_in_the_tokenizer_is_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    directory = save(tmp_path, backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    expected = byte_level().encode("The quick brown fox").ids
    assert Tokenizer(directory).encode("The quick brown fox") == expected


def test_eos_ids_are_the_models_and_the_tokenizers(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    directory = find(tmp_path, weights=False)
    assert directory.eos_token_ids == {7, 9}
    assert Tokenizer(directory).eos_token_ids == {7, 9, 2}


def test_a_broken_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    directory = save(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(directory)


def test_text_and_ids_that_cannot_be(ours: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="surrogate pair"):
        ours["bundled"].encode("\ud800")
    with pytest.raises(RequestError, match="at least 0"):
        ours["bundled"].decode([-1])
