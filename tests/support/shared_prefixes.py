"""Sequences with a common prefix on a memory worker's device."""

from typing import Any

import numpy as np

from lamina.core.types import AttentionSpec, KvElement
from lamina.memory.device.base import New, Pairs
from lamina.memory.device.gpu import Gpu
from lamina.memory.slab import Slab
from tests.support import reference_attention

SPECS = [
    AttentionSpec(0, 4, 2, 16, 16, 0.25),
    AttentionSpec(1, 6, 2, 24, 16, 0.2, window=9, softcap=5.0),
    AttentionSpec(2, 4, 4, 16, 16, 0.25, alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
]


def check_shared_prefixes(backend: Any, samples: int) -> list[int]:
    """Samples of one prompt, those of another, and a sequence by itself; each appends a token while it attends. By
    layer, how many kernels added shared prefixes, if the backend counts them."""
    rng, slab, joined = np.random.default_rng(samples), Slab[int](700), list[int]()
    device = Gpu(backend, SPECS, KvElement.FLOAT32, 700, least_saved=0)
    for prompt, length in ((100, 150), (200, 80)):
        slab.open(prompt)
        slab.append(prompt, length)
    for each in range(samples):
        slab.fork(100, each, 150)
    slab.fork(200, 300, 80)
    slab.open(400)
    segments = rng.permutation([*range(samples), 200, 300, 400]).tolist()
    for each in segments:
        slab.append(each, int(rng.integers(1, 6)) + 20 * (each == 400))
    lengths = [len(slab.slots(each)) for each in segments]
    last = [int(slab.slots(each)[-1]) for each in segments]
    used = np.concatenate([slab.slots(each) for each in segments])
    order = rng.permutation(len(segments))  # of the message's k and v
    seen = Pairs(
        rows=[1] * len(segments),
        query_start=[length - 1 for length in lengths],
        kv_start=[0] * len(segments),
        keys=segments,
        first=[0] * len(segments),
        stop=lengths,
        new=np.argsort(order).tolist(),
    )
    table = device.table(seen, slab.slots)
    for layer, spec in enumerate(SPECS):
        k, v, q = (
            rng.standard_normal((count, heads, size)).astype(np.float32)
            for count, heads, size in (
                (700, spec.kv_heads, spec.qk_dim),
                (700, spec.kv_heads, spec.v_dim),
                (len(segments), spec.query_heads, spec.qk_dim),
            )
        )
        kept = np.setdiff1d(used, last).astype(np.int32)
        device.keep(layer, *map(device.sent, (k[kept], v[kept], kept)))
        slots = np.array(last, np.int32)[order]
        out, lse = device.results(len(segments), spec)
        backend.joined = 0
        new = New(device.sent(k[slots]), device.sent(v[slots]), device.sent(slots))
        for _ in table.attend(layer, device.sent(q), out, lse, new=new):
            pass
        joined.append(backend.joined)
        whole = seen.table(np.concatenate([slab.slots(each) for each in segments]))
        wanted_out, wanted_lse = reference_attention.partial(q, k, v, whole, spec, threads=1)
        np.testing.assert_allclose(out, wanted_out, rtol=0, atol=1e-5)
        np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)
    return joined
