"""What travels for a token, counted by hand and against the paper's formula."""

import pytest

from lamina.transport.wire import nbytes_per_token, paper_nbytes_per_token
from lamina.types import AttentionSpec, DType


@pytest.mark.parametrize(
    ("layers", "query_heads", "kv_heads", "dim", "paper", "ours"),
    [
        # LLaMA-7B: 4 e d L = 4 x 2 x 4096 x 32. Here q, k, v in bf16; out and one lse per head in float32.
        (32, 32, 32, 128, 1048576, 32 * (3 * 4096 * 2 + 4096 * 4 + 32 * 4)),
        # Llama-3-70B, 8 query heads per KV head: (2 + 2/8) x 2 x 8192 x 80.
        (80, 64, 8, 128, 2949120, 80 * ((8192 + 2 * 1024) * 2 + 8192 * 4 + 64 * 4)),
    ],
)
def test_bytes_per_token(layers: int, query_heads: int, kv_heads: int, dim: int, paper: int, ours: int) -> None:
    spec = AttentionSpec(layer=0, query_heads=query_heads, kv_heads=kv_heads, qk_dim=dim, v_dim=dim, scale=dim**-0.5)
    assert paper_nbytes_per_token([spec] * layers, DType.BFLOAT16) == paper
    assert nbytes_per_token([spec] * layers, DType.BFLOAT16) == ours
