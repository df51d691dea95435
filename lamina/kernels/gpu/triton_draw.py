"""Draws tokens from logits by the Gumbel-max trick, in Triton."""

import triton
import triton.language as tl


@triton.jit
def draw(
    logits, stride, places, highest, least, temperature, keys, tokens, width, block: tl.constexpr
):  # fmt: skip
    """Draws as ``native/include/lamina/elementwise.h`` says of ``Draw``, in float32. Grid (rows,).

    Noise equals that of the CPU to 2e-6.
    """
    row = tl.program_id(0)
    source = logits + tl.load(places + row) * stride
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    peak, floor, scale = tl.load(highest + row), tl.load(least + row), tl.load(temperature + row)
    lanes = tl.arange(0, block)
    best = tl.full([block], float("-inf"), tl.float32)
    found = tl.zeros([block], tl.int32)
    for start in range(0, width, block):
        token = start + lanes
        logit = tl.load(source + token, mask=token < width, other=float("-inf")).to(tl.float32)
        z = key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        h = (z ^ (z >> 31)) >> 32
        u = (h.to(tl.float32) + 0.5) * 2.0**-32
        rest = ((0xFFFFFFFF - h).to(tl.float32) + 0.5) * 2.0**-32  # 1 - u
        # -log(1 - u), by its series where 1 - u has lost most digits of u.
        waiting = tl.where(u < 0.03125, u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25))), -tl.log(rest))
        score = (logit - peak) / scale - tl.log(waiting)
        better = (logit >= floor) & (score > best)
        best = tl.where(better, score, best)
        found = tl.where(better, token, found)
    winner = tl.min(tl.where(best == tl.max(best, 0), found, width), 0)
    tl.store(tokens + row, winner.to(tl.int64))
