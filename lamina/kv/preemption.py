"""What becomes of requests whose KV is dropped, or lost with a memory worker. Pure: no clock, no sockets."""

from collections.abc import Callable, Iterator, Mapping

from lamina.core.requests import Completion, Group

Victim = Callable[[Group, int], int]
"""Orders victims, the smallest first, by a request and the KV tokens that it holds on the worker that runs out. Victims
of the same order are preempted from the last in the order of admission on."""


def latest(group: Group, held: int) -> int:
    """Choose the last in the order of admission: it has waited least, and the order in which requests end stays."""
    return 0


def smallest(group: Group, held: int) -> int:
    """Choose the one with fewest tokens to compute again."""
    return held


POLICIES: Mapping[str, Victim] = {"latest": latest, "smallest": smallest}


def _arrival(group: Group) -> tuple[float, ...]:
    return (group.arrival,)


def victims(
    holders: Mapping[Group, int],
    tokens: int,
    victim: Victim = latest,
    rank: Callable[[Group], tuple[float, ...]] = _arrival,
) -> list[Group]:
    """Return the requests to preempt so that ``tokens`` come back, or as many as possible.

    The request with the smallest rank stays in any case: so there is always one that ends.

    Args:
        holders: The requests with KV on one worker, and how many tokens.
        tokens: How many must come back.
        victim: Chooses among the others.
        rank: Order of admission; no two requests have the same.
    """
    if not holders:
        return []
    others = sorted(holders, key=rank)[1:]
    order = sorted(reversed(others), key=lambda one: victim(one, holders[one]))
    chosen = []
    for group in order:
        if tokens <= 0:
            break
        chosen.append(group)
        tokens -= holders[group]
    return chosen


def resumed(sequence: int, index: int, generated: list[int]) -> Completion:
    """Return a completion that has drawn these tokens, of which no worker has KV. It adds to the list."""
    return Completion(sequence, index, generated, known=len(generated), own=len(generated))


def again(group: Group, sequences: Iterator[int]) -> Group:
    """Return a request's completions that go on, under new sequence numbers: what they have generated is computed
    again.

    They share the lists of generated tokens with ``group``, which must not add to them any more. Beams begin with the
    tokens chosen last.
    """
    generated = [one.generated for one in group.alive]
    if group.choice is not None:
        generated = [[*generated[parent], token] for parent, token in group.choice]
    completions = [
        resumed(next(sequences), one.index, tokens) for one, tokens in zip(group.alive, generated, strict=True)
    ]
    return Group(
        group.request,
        group.max_tokens,
        completions,
        group.arrival,
        heads=group.heads,
        expand=group.expand,
        gave_way=group.gave_way,
        cached_tokens=group.cached_tokens,
    )
