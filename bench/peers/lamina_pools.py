"""Lamina with a compute worker and a memory worker, both on all cores. See ``offline.py``."""

from functools import partial

from bench.peers.lamina_offline import about, load
from bench.peers.offline import run

if __name__ == "__main__":
    run(partial(load, memory="cpu:1"), about)
