"""What becomes of requests whose KV is dropped, or lost with a memory worker. Pure: no clock, no sockets."""

from collections.abc import Iterator

from lamina.groups import Completion, Group


def again(group: Group, sequences: Iterator[int]) -> Group:
    """A request's completions that go on, under new sequence numbers: what they have generated is computed again.

    They share the lists of generated tokens with ``group``, which must not add to them any more.
    """
    completions = [
        Completion(next(sequences), one.index, one.generated, known=len(one.generated)) for one in group.alive
    ]
    return Group(group.request, group.max_tokens, completions, group.arrival, heads=group.heads)
