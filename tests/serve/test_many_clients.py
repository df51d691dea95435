"""Many clients at once, and clients that leave."""

import asyncio

import httpx

from tests.support.scripted_engine import COMPLETION, TIMEOUT_S, Running


def test_a_client_that_leaves_a_stream_cancels_its_requests(server: Running) -> None:
    body = {"prompt": ["hang", "hang"], "stream": True}
    with httpx.stream("POST", f"{server.url}{COMPLETION}", json=body, timeout=TIMEOUT_S) as response:
        next(response.iter_lines())
    assert server.engine.wait_until(lambda: server.engine.running <= server.engine.aborted)
    assert len(server.engine.running) == 2


def test_a_client_that_leaves_before_its_answer_cancels_its_requests(server: Running) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            asking = asyncio.ensure_future(client.post(f"{server.url}{COMPLETION}", json={"prompt": ["hang", "hang"]}))
            both = asyncio.to_thread(server.engine.wait_until, lambda: len(server.engine.running) == 2)
            assert await both
            asking.cancel()

    asyncio.run(leave())
    # Requests of the previous test may be cancelled once more.
    assert server.engine.wait_until(lambda: server.engine.running <= server.engine.aborted)


def test_answers_of_many_clients_do_not_mix(server: Running) -> None:
    async def ask(client: httpx.AsyncClient, number: int) -> str:
        response = await client.post(f"{server.url}{COMPLETION}", json={"prompt": f"{number}", "echo": True})
        text: str = response.json()["choices"][0]["text"]
        return text

    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(ask_all()) == [f"{number} one two three" for number in range(64)]


def test_the_engine_is_told_who_asks(server: Running) -> None:
    """An account for each API key, or else for each connection."""
    server.engine.forget()
    with httpx.Client(timeout=TIMEOUT_S) as one, httpx.Client(timeout=TIMEOUT_S) as other:
        for client, key in ((one, None), (other, None), (one, "a"), (other, "a"), (other, "b"), (one, None)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            client.post(f"{server.url}{COMPLETION}", json={"prompt": ["x", "y"]}, headers=headers).raise_for_status()
    clients = server.engine.clients
    assert clients[::2] == clients[1::2]  # the prompts of one body
    first, second, first_a, second_a, second_b, again = clients[::2]
    assert first.account != second.account and first == again
    assert first_a.account == second_a.account not in (first.account, second_b.account)
    assert [client.connection for client in (first_a, second_a, second_b)] == [
        first.connection,
        second.connection,
        second.connection,
    ]
