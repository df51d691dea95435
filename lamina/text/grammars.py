"""Compiles the constraints of structured outputs for llguidance: JSON schema, regular expression, choices, grammar."""

import functools
import json
import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from lamina.core.errors import RequestError
from lamina.core.sampling import SamplingParams, StructuredOutputs
from lamina.text.json_schemas import find_self_reference, subschemas, without_annotations

STACK_NBYTES = 512 * 1024 * 1024
"""Address space of the stack. Only what is used takes memory."""

_starting = threading.Lock()

T = TypeVar("T")


def run_deep(function: Callable[[], T]) -> T:
    """Return ``function()``, called in a thread with a stack of ``STACK_NBYTES``. Raises what it raises."""
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # the caller's thread raises it
            result.set_exception(error)

    with _starting:  # the size is one of the process
        before = threading.stack_size(STACK_NBYTES)
        try:
            threading.Thread(target=run, name="lamina-deep", daemon=True).start()
        finally:
            threading.stack_size(before)
    return result.result()


JSON_SPACE = r"(\n[ \t]{0,32}| )?"
"""White space allowed between JSON tokens. It is bounded: a model could otherwise generate white space forever."""


MOST_LETTERS = 256 * 1024
"""Length of the longest constraint. llguidance recurses along references, which a longer one may have too many of."""

MOST_LOCATED = 1024 * 1024
"""Characters of schemas that are compiled to find an error."""


@functools.lru_cache(maxsize=256)
def compile_grammar(wanted: StructuredOutputs) -> str:
    """Return the grammar that ``llguidance.LLMatcher`` enforces.

    Raises:
        RequestError: The constraint cannot be compiled. The message names the field, and the part of a JSON schema.
    """
    name = next(name for name in ("json", "regex", "choice", "grammar") if getattr(wanted, name) is not None)
    text = getattr(wanted, name)
    size = len(text) if isinstance(text, str) else sum(map(len, text))
    if size > MOST_LETTERS:
        raise RequestError(f"{name} has {size} characters; give at most {MOST_LETTERS}")
    try:
        return run_deep(lambda: _compile_json(text) if name == "json" else _compile_text(wanted, name))
    except RecursionError:
        raise RequestError(f"{name} cannot be compiled: it is nested too deeply") from None


def _compile_json(schema: str) -> str:
    grammar, fault = _compile_schema(schema)
    if fault:
        raise RequestError(f"json cannot be compiled at {_locate_error(json.loads(schema))}: {fault}")
    return grammar


def as_rule(wanted: StructuredOutputs) -> str:
    """Return the right side of a rule in Lark's syntax that matches what ``wanted`` matches."""
    if wanted.json is not None:
        schema = without_annotations(json.loads(wanted.json))
        options = {"whitespace_flexible": True, "whitespace_pattern": JSON_SPACE}
        return "%json " + json.dumps({**(schema if isinstance(schema, dict) else {}), "x-guidance": options})
    if wanted.regex is not None:
        return "/" + re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], wanted.regex) + "/"
    if wanted.choice is not None:
        return " | ".join(json.dumps(text) for text in wanted.choice)
    return f"%lark {{\n{_lark(wanted.grammar or '')}\n}}"


def after_reasoning(wanted: StructuredOutputs, end: str) -> StructuredOutputs:
    """Return a grammar that allows free text up to the tag ``end``, then requires ``wanted``.

    For prompts that end inside the model's reasoning: ``wanted`` holds for the answer, not for the reasoning.
    """
    reasoning = f"reasoning[suffix={json.dumps(end)}]: /(.|\\n)*/"
    return StructuredOutputs(grammar=f"start: reasoning answer\n{reasoning}\nanswer: {as_rule(wanted)}\n")


_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
"""What grammars in llama.cpp's syntax contain."""


def _lark(grammar: str) -> str:
    """Return a grammar in Lark's syntax. Raises ValueError for one in llama.cpp's that cannot be translated."""
    if _GBNF.search(grammar) is None:
        return grammar
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    try:
        rules = _leaves_first(GrammarParser().parse(_ESCAPE.sub(_unescaped, grammar)))
        resolve(rules)
    except RecursionError:
        raise
    except Exception as error:  # the library raises plain Exception, and IndexError at the end of the text
        fault = "it ends within an escape sequence" if isinstance(error, IndexError) else str(error)
        raise ValueError(fault) from error
    return "\n".join(["%llguidance {}", *map(str, rules.values())]) + "\n"


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _unescaped(escape: re.Match[str]) -> str:
    r"""Return the character of an escape \u or \U, for which llguidance would write an escape that it cannot read.

    Other escapes stay as they are.
    """
    code = int(escape[1] or escape[2] or "0", 16)
    if not code or 0xD800 <= code < 0xE000 or code > sys.maxunicode:
        return escape[0]
    return chr(code) if code > 0x7F or chr(code).isalnum() else f"\\x{code:02x}"


def _leaves_first(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rules in an order in which each follows those that it refers to, as far as there are no cycles.

    llguidance visits all rules once more for each rule that precedes one that it refers to.
    """
    ordered, seen = dict[str, Any](), set[str]()
    for first in rules:
        path = [(first, iter(_named_in(rules[first])))] if first not in seen else []
        seen.add(first)
        while path:
            name, unvisited = path[-1]
            child = next((one for one in unvisited if one in rules and one not in seen), None)
            if child is None:
                ordered[name] = rules[name]
                path.pop()
            else:
                seen.add(child)
                path.append((child, iter(_named_in(rules[child]))))
    return ordered


def _named_in(rule: Any) -> list[str]:
    """Return the names of the rules to which a rule of llguidance's parser refers."""
    from llguidance.gbnf_to_lark import RuleRefNode

    nodes, names = [rule], list[str]()
    while nodes:
        node = nodes.pop()
        nodes += node.children()
        if isinstance(node, RuleRefNode):
            names.append(node.name)
    return names


def require_grammar(params: SamplingParams, eos_token_ids: Collection[int]) -> None:
    """Raise RequestError if structured outputs cannot be compiled, or the model has no end-of-sequence token."""
    if params.structured_outputs is None:
        return
    compile_grammar(params.structured_outputs)
    if not eos_token_ids:
        raise RequestError("structured_outputs need a model with an end-of-sequence token; name it in its config.json")


def _compile_schema(schema: str) -> tuple[str, str]:
    """Return the grammar of a JSON schema, and the compiler's error, which is empty if it compiles."""
    from llguidance import LLMatcher  # saves 30 ms of the time to import the SDK

    parsed = json.loads(schema)
    if parsed is True:
        parsed = {}
    elif not isinstance(parsed, dict):
        return "", "a schema is an object, or true"
    if (reference := find_self_reference(parsed)) is not None:
        return "", f"the reference {reference} leads to itself, so that no answer matches"
    options: Any = {"whitespace_flexible": True, "whitespace_pattern": JSON_SPACE}
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(without_annotations(parsed)), overrides=options)
    except ValueError as error:
        return "", str(error)
    return grammar, _compile_error(grammar)


def _compile_text(wanted: StructuredOutputs, name: str) -> str:
    from llguidance import LLMatcher

    if wanted.regex is not None:
        grammar = LLMatcher.grammar_from_regex(wanted.regex)
    elif wanted.choice is not None:
        grammar = LLMatcher.grammar_from_lark("start: " + as_rule(wanted))
    else:
        try:
            grammar = LLMatcher.grammar_from_lark(_lark(wanted.grammar or ""))
        except ValueError as error:
            raise RequestError(f"{name} cannot be compiled: {error}") from error
    if fault := _compile_error(grammar):
        raise RequestError(f"{name} cannot be compiled: {fault}")
    return grammar


def _compile_error(grammar: str) -> str:
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0].strip() if failed else ""


def _locate_error(schema: Any) -> str:
    """Return the JSON pointer of a subschema that cannot be compiled alone: of the smallest one, unless that takes too
    long to find."""
    left = MOST_LOCATED
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    place = "#"
    while True:
        for name, part in subschemas(schema):
            whole = json.dumps({**part, **shared} if isinstance(part, dict) else part)
            left -= len(whole)
            if left < 0:
                return place
            if _compile_schema(whole)[1]:
                place, schema = f"{place}/{name}", part
                break
        else:
            return place
