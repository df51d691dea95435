"""Routes for tokens and the server's state."""

from typing import Any

import pytest

import lamina
from tests.support.scripted_engine import Running, refusal


def test_text_becomes_tokens_and_text_again(server: Running) -> None:
    answer = server.post("/tokenize", prompt="abc", return_token_strs=True).json()
    assert answer == {"count": 3, "max_model_len": 100, "tokens": [97, 98, 99], "token_strs": [None] * 3}
    assert server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "abc"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "a"}], model="alias").json()
    assert server.post("/detokenize", tokens=chat["tokens"]).json() == {"prompt": "<user>a"}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/tokenize", {}, 400, "give prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "give prompt or messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt: Expected `str`"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0] has no content"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "does not exist"),
        ("/detokenize", {}, 400, "tokens: Field required"),
        ("/detokenize", {"tokens": [-1]}, 400, "outside the vocabulary"),
        ("/v1/embeddings", {"input": "a"}, 501, "gives no embeddings"),
    ],
)
def test_what_has_no_answer_is_refused(
    server: Running, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    assert said in refusal(server.post(path, **body), status)["message"]


def test_the_server_s_state(server: Running) -> None:
    assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 200
    assert server.http.get("/version").json() == {"version": lamina.__version__}
    assert server.http.get("/load").json() == {"server_load": 3}
