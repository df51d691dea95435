"""Constraints along whose references llguidance recurses deeply: they end no process, wherever they are compiled."""

import json
import subprocess
import sys
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from lamina.core.errors import RequestError
from lamina.core.sampling import StructuredOutputs
from lamina.text.grammars import MOST_LETTERS, compile_grammar, run_deep


def references(count: int, around: Any) -> Any:
    """A schema with a chain of definitions, each of which refers to the next one."""
    chain = {f"d{place}": around({"$ref": f"#/$defs/d{place + 1}"}) for place in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": chain | {f"d{count}": {"type": "integer"}}}


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "rules": {"grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(5000)) + 'r5000: "a"\n'},
    "references": {"json": references(5000, lambda reference: reference)},
    "objects": {"json": references(3000, lambda reference: {"properties": {"a": reference}})},
    "choices": {"json": references(3000, lambda reference: {"anyOf": [reference, {"type": "null"}]})},
}

CONSTRAINTS |= {
    "rules of llama.cpp": {
        "grammar": "root ::= r0\n" + "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(8000)) + 'r8000 ::= "b"\n'
    },
    "rules of llama.cpp in a circle": {
        "grammar": "root ::= r0\n" + "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(8000)) + 'r8000 ::= "b" r0 | "c"'
    },
}
"""Rules of llama.cpp become rules of Lark in time that is linear in their number: else, this would take an hour."""

RUN = """
import json, sys
import torch
from lamina.compute.constraints import Grammars, forbid
from lamina.core.sampling import StructuredOutputs
from lamina.models.directory import find
from lamina.text.grammars import compile_grammar
from lamina.text.tokenizer import Tokenizer

wanted = StructuredOutputs(**json.load(sys.stdin))
compile_grammar(wanted)
tokenizer = Tokenizer(find(None, weights=False))
constraint = Grammars(lambda: tokenizer, sorted(tokenizer.eos_token_ids)).begin(wanted, 2048)
scores = forbid(torch.zeros(1, 2048), [0], [constraint])
allowed = [tokenizer.decode([token]) for token in torch.nonzero(scores[0] == 0).flatten().tolist()]
print(json.dumps(sorted({text[:1] for text in allowed})))
"""


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_long_chain_of_references_ends_no_process(name: str) -> None:
    given = json.dumps(CONSTRAINTS[name])
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, check=False, input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]
    assert json.loads(done.stdout) != []


def test_a_constraint_that_is_too_long_or_too_deep_is_refused() -> None:
    with pytest.raises(RequestError, match=f"has {MOST_LETTERS + 1} characters; give at most {MOST_LETTERS}"):
        compile_grammar(StructuredOutputs(regex="a" * (MOST_LETTERS + 1)))
    with pytest.raises(RequestError, match="grammar cannot be compiled: it is nested too deeply"):
        compile_grammar(StructuredOutputs(grammar="root ::= " + "(" * 5000 + '"a"' + ")" * 5000))
    deep: Any = {"type": "array"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match=r"json cannot be compiled at #/items"):
        compile_grammar(StructuredOutputs(json=deep))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("root ::= missing", "Rule 'missing' not found"),
        ('root ::= "a\\', "ends within an escape sequence"),
        ('root ::= "a"{' + "9" * 5000 + "}", "digits"),
        ('start ::= "a"\nroot ::= start', "'start' already exists"),
        ('rule ::= "a"', "No 'root' rule"),
    ],
)
def test_grammars_of_llama_cpp_that_mean_nothing_are_refused(grammar: str, said: str) -> None:
    with pytest.raises(RequestError, match=f"^grammar cannot be compiled: .*{said}"):
        compile_grammar(StructuredOutputs(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "fits", "fails"),
    [
        (r'root ::= "\u0041\u00e9\u20ac\U0001F600"', "Aé€😀", "A"),
        (r"root ::= [\u0041-\u0043\u002d\u005d]+", "AC-]", "E"),
        (r'root ::= "\\u" [0-9]', r"\u1", "A"),
        ("start: /[a::=]+/", "a:", "b"),
        ('root ::= one two\ntwo ::= "2" one?\none ::= "1"', "121", "2"),
    ],
)
def test_grammars_of_llama_cpp_mean_what_they_mean_there(grammar: str, fits: str, fails: str) -> None:
    matcher = LLMatcher(LLTokenizer("byte"), compile_grammar(StructuredOutputs(grammar=grammar)))
    for text, expected in ((fits, True), (fails, False)):
        tokens = list(text.encode())
        whole = matcher.deep_copy()
        assert (whole.try_consume_tokens(tokens) == len(tokens) and whole.is_accepting()) is expected


def test_errors_and_results_come_back() -> None:
    def deep(levels: int) -> int:
        return 0 if levels == 0 else 1 + deep(levels - 1)

    assert run_deep(lambda: deep(100)) == 100
    with pytest.raises(RecursionError):
        run_deep(lambda: deep(10**6))
