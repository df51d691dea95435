"""Shows Lamina on a Ray cluster made for the occasion: ``make run-ray``.

A head and two nodes run on this machine. The compute worker is on the head, a memory worker on each node. While text is
generated, one node is removed: what its memory worker held is computed again elsewhere, and the text goes on.
"""

import os
import sys
import time

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import psutil
import ray
from ray.cluster_utils import Cluster

from lamina import Lamina, SamplingParams

PROMPT = "def fibonacci(n):"
TOKENS, CUT = 96, 32


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def main() -> int:
    begin = time.monotonic()
    say("Starting a Ray cluster of one head and two nodes ...")
    head = {"num_cpus": 1, "include_dashboard": False, "resources": {"big": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1, resources={"cheap": 2 if last else 1}) for last in (False, True)]
    say(f"  {cluster.address}, after {time.monotonic() - begin:.0f} s")
    try:
        say("Starting Lamina: lamina launch --ray ADDRESS --compute big:1 --memory cheap:2 --kind big=big,cheap=cheap")
        lamina = Lamina(compute="big:1", memory="cheap:2", ray=cluster.address, kind="big=big,cheap=cheap", seed=3)
        processes = psutil.Process().children(recursive=True)
        with lamina:
            for member in lamina.engine.topology.members:
                say(f"  {member.name} on a node with {member.kind!r}")
            generate(lamina, cluster, nodes[0])
    finally:
        if ray.is_initialized():
            ray.shutdown()
        cluster.shutdown()
    _, left = psutil.wait_procs(processes, 20)
    say(f"\n{len(left)} processes are left; {time.monotonic() - begin:.0f} s in all.")
    return 1 if left else 0


def generate(lamina: Lamina, cluster: Cluster, node: object) -> None:
    """Complete the prompt twice: undisturbed, and while a node is removed. Raises SystemExit if the texts differ."""
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
            say("\n--- a node is removed ---", end="")
            cluster.remove_node(node, allow_graceful=False)
            say(" the text goes on ---")
    stats = lamina.engine.stats()
    say(f"\n\n{stats.recoveries} recovery, {stats.recomputed} tokens computed again.")
    if shown != expected or stats.recoveries != 1:
        raise SystemExit("error: the text is not that of an undisturbed run")
    say("The text is that of an undisturbed run.")


if __name__ == "__main__":
    sys.exit(main())
