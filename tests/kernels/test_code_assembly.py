"""The PTX that converts codes of 8 bits to bfloat16 two at a time, evaluated for every pair of codes."""

import numpy as np
import pytest
import torch

from lamina.kernels.gpu import triton_attend

NAN = 0x7F  # of e4m3, without its sign; nothing writes it


def multiply_add(a, b, c):
    """Return a * b + c of the bfloat16s whose bits are in the lower half of each word."""
    a, b, c = ((np.uint32(each) << 16).view(np.float32).astype(np.float64) for each in (a, b, c))
    exact = torch.from_numpy(a * b + c)
    return exact.bfloat16().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def evaluate(assembly, given):
    """Return register $0 (uint32) after PTX that reads ``given`` (uint32) from register $1."""
    registers = {"$1": given}
    for line in assembly.strip("{} \n").splitlines():
        name, _, rest = line.strip().rstrip(";").partition(" ")
        if name == ".reg":
            continue
        target, *sources = rest.split(", ")
        a, *others = [registers[each] if each in registers else np.uint32(int(each, 0)) for each in sources]
        match name:
            case "mov.b32":
                value = a
            case "and.b32":
                value = a & others[0]
            case "shl.b32":
                value = a << others[0]
            case "shr.u32":
                value = a >> others[0]
            case "lop3.b32":
                assert others[2] == 0xEA  # the truth table of a & b | c
                value = a & others[0] | others[1]
            case "fma.rn.bf16x2":
                b, c = others
                low = multiply_add(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF)
                value = low | multiply_add(a >> 16, b >> 16, c >> 16) << 16
            case _:
                raise AssertionError(f"unknown instruction: {line.strip()}")
        registers[target] = value
    return registers["$0"]


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("element", ["INT8", "FP8"])
def test_both_codes_of_a_register_become_their_values(element, second):
    codes = np.arange(256, dtype=np.uint8)
    mine = np.stack(np.meshgrid(codes, codes), -1).reshape(-1, 2)  # every pair of codes
    pairs = np.random.default_rng(0).integers(0, 256, (len(mine), 2, 2), dtype=np.uint8)
    pairs[:, :, int(second)] = mine
    assembly = getattr(triton_attend, f"{element}_{'HIGH' if second else 'LOW'}").value
    found = evaluate(assembly, pairs.reshape(-1, 4).view(np.uint32)[:, 0]).view(np.uint16).reshape(-1, 2)
    stored = torch.from_numpy(mine).view(torch.int8 if element == "INT8" else torch.float8_e4m3fn)
    right = stored.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    written = np.full(mine.shape, True) if element == "INT8" else (mine & NAN) != NAN
    np.testing.assert_array_equal(found[written], right[written])
