"""Limits of requests, of steps, and of the number of requests of a client. Pure."""

from dataclasses import dataclass

from lamina.core.errors import OverloadedError, RequestError
from lamina.core.sampling import SamplingParams
from lamina.core.types import Client
from lamina.kv.placement import Placement


@dataclass(frozen=True)
class Limits:
    """Bounds of one request, of one step, and of the sequences that decode at once.

    Attributes:
        max_num_seqs: sequences that each replica decodes at once, as in ``EngineConfig``.
        max_num_batched_tokens: token rows of a step.
        max_model_len: tokens of a prompt and its completion together.
        replicas: copies of the weights.
        row_lanes: number of lanes whose rows add up; 1 if one lane may get the sequences of all lanes.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    replicas: int = 1
    row_lanes: int = 1

    @property
    def max_sequences(self) -> int:
        """Sequences that all lanes together decode at once; each needs a row of its lane's step."""
        return min(self.max_num_seqs * self.replicas, self.max_num_batched_tokens * self.row_lanes)

    def validate_request(self, prompt_length: int, params: SamplingParams, placement: Placement) -> None:
        """Raise RequestError, with the numbers, for a request that can never be served."""
        limit = self.max_model_len
        if prompt_length == 0:
            raise RequestError("the prompt is empty; give at least one token")
        if prompt_length >= limit:
            raise RequestError(
                f"the prompt has {prompt_length} tokens; this runtime takes at most {limit - 1} "
                f"(max_model_len {limit}, one left for the answer). Shorten the prompt or raise max_model_len"
            )
        together = min(self.max_sequences, self.max_num_batched_tokens)  # of one request, in one lane
        if params.n > together:
            raise RequestError(f"n is {params.n}; this runtime decodes {together} sequences of a request at once")
        room = self.most_tokens(prompt_length, params, placement)
        if (forced := len(params.forced_token_ids)) > room:
            raise RequestError(
                f"forced_token_ids has {forced} tokens; a prompt of {prompt_length} tokens leaves room for {room} "
                f"(max_model_len {limit}). Force fewer or shorten the prompt"
            )
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens is {params.min_tokens}; a prompt of {prompt_length} tokens leaves room for {room} "
                f"(max_model_len {limit}). Lower min_tokens or shorten the prompt"
            )
        placement.require_possible(prompt_length + params.n * (room - 1))

    def most_tokens(self, prompt_length: int, params: SamplingParams, placement: Placement) -> int:
        """Return the most tokens of one completion of a request."""
        room = self.max_model_len - prompt_length
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        # As many as all slabs can hold; the KV of the last drawn token is not needed.
        return max(1, min(room, (placement.possible - prompt_length) // params.n + 1))


MAX_WAITING = 16384  # requests of one client that wait


class Places:
    """Bounds how many requests of each client an engine holds.

    A client may hold as many places as are still free (the dynamic thresholds of Choudhury and Hahne, IEEE/ACM
    Transactions on Networking 1998). So a single client gets half of all places, and others always find some.
    """

    def __init__(self, most: int) -> None:
        """``most``: places that a single client may hold."""
        self._free = 2 * most
        self._clients: dict[str, Client] = {}  # by request
        self._taken: dict[Client, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._clients

    def __len__(self) -> int:
        return len(self._clients)

    def reserve_place(self, request_id: str, client: Client, again: bool = False) -> None:
        """Reserve a place for a request. Raises OverloadedError, with the numbers, if its client has its share already.

        ``again``: the request had a place before the engine was restarted, and gets it in any case.
        """
        taken = self._taken.get(client, 0)
        if taken >= self._free and not again:
            raise OverloadedError(
                f"{len(self)} requests are in the engine, {taken} of them from this client, which may have at most as "
                f"many as there are free places: {self._free}; try again later"
            )
        self._clients[request_id] = client
        self._taken[client] = taken + 1
        self._free -= 1

    def free_place(self, request_id: str) -> None:
        client = self._clients.pop(request_id, None)
        if client is not None:
            self._free += 1
            self._taken[client] -= 1
            if not self._taken[client]:
                del self._taken[client]
