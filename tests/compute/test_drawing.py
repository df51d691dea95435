"""The kernels that draw tokens, each against float64 on numpy: the native ones, and Triton's."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina import _native
from lamina.compute import sampler
from lamina.kernels.gpu.specialize import draw_program
from tests.compute.noise import gumbel, splitmix64
from tests.support.gpu_device import BACKEND, give, take

ROWS = 24


def expected(logits: Tensor, least: Tensor, temperature: Tensor, keys: Tensor) -> np.ndarray:
    """The token of each row of logits [R, V] by its definition."""
    noise = gumbel(keys.numpy().view(np.uint64), logits.shape[1])
    scores = logits.double().numpy() / temperature.double().numpy()[:, None] + noise
    return np.where(logits.float().numpy() < least.numpy()[:, None], -np.inf, scores).argmax(-1)


def case(
    width: int, spread: float, cut: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits, the highest and its token, the least, temperatures and keys. ``cut``: the share of tokens not drawn."""
    random = torch.Generator().manual_seed(width)
    logits = (torch.randn(ROWS, width, generator=random) * spread).to(dtype)
    highest, tokens = logits.max(-1)
    least = logits.float().sort(-1).values[:, int(cut * (width - 1))]
    temperature = torch.rand(ROWS, generator=random) * 2 + 0.01
    keys = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=random)
    return logits, highest.float(), tokens, least, temperature, keys


def test_the_hash_is_splitmix64():
    """The outputs for one seed, as the program of its author prints them (Sebastiano Vigna, prng.di.unimi.it)."""
    printed = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(np.array([1234567], np.uint64), 3)[0].tolist() == printed


@pytest.mark.parametrize("path", _native.attention_paths())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cut", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("width", "spread"), [(1, 1.0), (7, 1.0), (33, 4.0), (5000, 0.0), (5003, 0.5), (5003, 6.0)])
def test_native_draws(width, spread, cut, dtype, path, monkeypatch):
    monkeypatch.setattr(sampler, "PATH", path)
    logits, highest, tokens, least, temperature, keys = case(width, spread, cut, dtype)
    places = torch.arange(ROWS).flip(0)  # the rows drawn from are not all, and in another order
    drawn = tokens[places][:20].contiguous()
    wanted = expected(logits, least, temperature, keys)[places][:20]
    arrays = [each[places][:20].contiguous() for each in (torch.arange(ROWS), highest, least, temperature, keys)]
    sampler.draw(logits, arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], drawn)
    assert drawn.tolist() == wanted.tolist()


@pytest.mark.parametrize("cut", [0.0, 0.5])
@pytest.mark.parametrize(("width", "spread"), [(7, 1.0), (5003, 0.5), (5003, 6.0)])
def test_triton_draws(width, spread, cut):
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    logits, highest, tokens, least, temperature, keys = case(width, spread, cut)
    result = give(tokens.numpy())
    arrays = [give(each.numpy()) for each in (torch.arange(ROWS), highest, least, temperature, keys)]
    BACKEND.launch(draw_program(np.float32), (ROWS,), [give(logits.numpy()), width, *arrays, result, width])
    assert take(result).tolist() == expected(logits, least, temperature, keys).tolist()
