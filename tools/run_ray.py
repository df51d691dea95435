"""Shows Lamina on a Ray cluster made for the occasion: ``make run-ray``.

A head and two nodes run on this machine. The compute worker is on the head, a memory worker on each node. While text is
generated, one node is removed: the KV of its memory worker is computed again elsewhere, and the text continues.
"""

import os
import sys
import time
from collections.abc import Mapping

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import psutil
import ray
from ray.cluster_utils import Cluster

from lamina import Lamina, SamplingParams

PROMPT = "def fibonacci(n):"
TOKENS, CUT = 96, 32
KINDS = "big=big,left=left,right=right"


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def main() -> int:
    begin, processes = time.monotonic(), list[psutil.Process]()
    say("Starting a Ray cluster of one head and two nodes ...")
    head = {"num_cpus": 2, "include_dashboard": False, "resources": {"big": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {kind: cluster.add_node(num_cpus=1, resources={kind: 1}) for kind in ("left", "right")}
    say(f"  {cluster.address}, after {time.monotonic() - begin:.0f} s")
    try:
        say("Starting Lamina, as lamina launch does with")
        say(f"  --ray {cluster.address} --compute big:1 --memory left:1,right:1 --kind {KINDS} --dtype float32")
        # In bfloat16, KV that is computed again may be rounded otherwise, and then so may the text.
        lamina = Lamina(compute="big:1", memory="left:1,right:1", ray=cluster.address, kind=KINDS, dtype="float32")
        processes = psutil.Process().children(recursive=True)
        with lamina:
            for member in lamina.engine.topology.members:
                say(f"  {member.name} on a node with {member.kind!r}")
            generate(lamina, cluster, nodes)
    finally:
        if ray.is_initialized():
            ray.shutdown()
        cluster.shutdown()
    _, left = psutil.wait_procs(processes, 20)
    say(f"\n{len(left)} processes are left; {time.monotonic() - begin:.0f} s in all.")
    return 1 if left else 0


def generate(lamina: Lamina, cluster: Cluster, nodes: Mapping[str, object]) -> None:
    """Complete the prompt twice: undisturbed, and while the node is removed that holds the KV.

    Raises SystemExit if the texts differ.
    """
    params = SamplingParams(max_tokens=TOKENS, temperature=0.7, seed=3, ignore_eos=True)
    expected = lamina.generate(PROMPT, params)[0].outputs[0].text
    say(f"\n{PROMPT}", end="")
    shown, removed = "", False
    for output in lamina.stream(PROMPT, params):
        one = output.outputs[0]
        say(one.text[len(shown) :], end="")
        shown = one.text
        if not removed and len(one.token_ids) >= CUT:
            removed = True
            used = lamina.engine.stats().memory
            holder = max(used, key=lambda name: used[name].used)
            kind = next(member.kind for member in lamina.engine.topology.members if member.name == holder)
            say(f"\n--- the node of {holder} is removed ---")
            cluster.remove_node(nodes[kind])
    stats = lamina.engine.stats()
    say(f"\n\n{stats.recoveries} recovery, {stats.recomputed} tokens computed again.")
    if stats.recoveries != 1:
        raise SystemExit("error: the node was removed without the engine noticing")
    if shown != expected:
        raise SystemExit("error: the text is not that of an undisturbed run")
    say("The text is that of an undisturbed run.")


if __name__ == "__main__":
    sys.exit(main())
