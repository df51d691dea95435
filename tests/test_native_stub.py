"""lamina/_native.pyi is what the installed native module generates, and says all that callers need."""

import ast
import re
import runpy
from pathlib import Path

STUBS = runpy.run_path(str(Path(__file__).parents[1] / "native" / "stubs.py"))
SOURCE: str = STUBS["STUB"].read_text()


def test_stub_is_current() -> None:
    assert STUBS["generate"]() == SOURCE, "lamina/_native.pyi is out of date: make native, then make stubs"


def test_stub_names_every_argument_and_type() -> None:
    functions = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        assert not any(re.fullmatch(r"arg\d*", one.arg) for one in arguments), f"{function.name} has unnamed arguments"
        types = [ast.unparse(one.annotation) for one in [*arguments, function.args.vararg] if one and one.annotation]
        assert function.returns is not None
        vague = {"object", "tuple", "list", "Sequence", "NDArray"} & {*types, ast.unparse(function.returns)}
        assert not vague, f"{function.name} has types that say too little: {vague}"
