"""Models by name: downloaded from a small hub on loopback that answers well, badly, or stops in the middle."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from lamina.core.errors import ModelError
from lamina.models import hub
from lamina.models.directory import BUNDLED
from tests.support.commands import LAMINA

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "team/small"
WEIGHTS = "model.safetensors"
FIND = "import sys; from lamina.models.directory import find; f = find(sys.argv[1]); print(f.path); print(f.name)"


@dataclass
class Hub:
    """What the hub has and how it behaves.

    Attributes:
        files: by name, the content.
        status: of all answers, if not 200.
        gated: the model needs an agreement.
        torn: bytes of the weights after which the next so many answers end.
        asked: paths of the requests for files, with their ranges.
    """

    files: dict[str, bytes]
    url: str = ""
    status: int = 200
    gated: bool = False
    torn: list[int] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)


@pytest.fixture
def small_hub(tmp_path: Path) -> Iterator[Hub]:
    own = Hub({file.name: file.read_bytes() for file in BUNDLED.iterdir() if file.suffix in (".json", ".safetensors")})
    own.files |= {
        "pytorch_model.bin": b"x" * 1000,
        "original/consolidated.00.pth": b"y" * 1000,
        "README.md": b"# Small",
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            own.tokens.add(self.headers.get("authorization", ""))
            if own.status != 200 or own.gated or f"/{NAME}" not in self.path:
                self.refuse(own.status if own.status != 200 else 403 if own.gated else 404)
            elif self.path.startswith("/api/models/"):
                self.describe(with_body)
            else:
                self.file(self.path.partition("/resolve/")[2].partition("/")[2].partition("?")[0], with_body)

        def describe(self, with_body: bool) -> None:
            _, _, asked = self.path.partition("/revision/" if "/revision/" in self.path else "/tree/")
            files = [{"type": "file", "path": name, "size": len(data), "oid": "b"} for name, data in own.files.items()]
            body: object = files
            if "/tree/" not in self.path:
                siblings = [{"rfilename": file["path"], "size": file["size"], "blobId": "b"} for file in files]
                body = {"id": NAME, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
            if asked and asked.partition("?")[0] not in ("main", "v1", COMMIT):
                self.refuse(404, "RevisionNotFound")
            else:
                self.say(200, json.dumps(body).encode(), {"Content-Type": "application/json"}, with_body)

        def file(self, name: str, with_body: bool) -> None:
            if name not in own.files:
                self.refuse(404, "EntryNotFound")
                return
            data, wanted = own.files[name], self.headers.get("range", "")
            headers = {"ETag": f'"{name}-{len(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if with_body:
                own.asked.append((name, wanted))
            if wanted:
                begin = int(wanted.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
                data = data[begin:]
            torn = own.torn.pop(0) if with_body and name == WEIGHTS and own.torn else None
            self.say(206 if wanted else 200, data, headers, with_body, torn)

        def say(
            self, status: int, body: bytes, headers: dict[str, str], with_body: bool, torn: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body[:torn])
            if torn is not None:
                self.close_connection = True

        def refuse(self, status: int, code: str = "") -> None:
            code = code or {403: "GatedRepo", 404: "RepoNotFound"}.get(status, "")
            self.say(
                status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no", "Content-Type": "application/json"}, True
            )

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    own.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield own
    server.shutdown()
    server.server_close()


def run(small_hub: Hub, home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that uses the hub, with a cache at ``home``."""
    own = {"HF_ENDPOINT": small_hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **variables}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(arguments, env=inherited | own, capture_output=True, text=True, timeout=120, check=False)


def find(small_hub: Hub, home: Path, model: str = NAME, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(small_hub, home, sys.executable, "-c", FIND, model, **variables)


def test_a_model_is_downloaded_once_with_only_the_files_that_are_needed(small_hub: Hub, tmp_path: Path) -> None:
    done = find(small_hub, tmp_path, HF_TOKEN="hf_abc")
    assert done.returncode == 0, done.stderr
    place, name = done.stdout.splitlines()
    assert name == NAME and Path(place).name == COMMIT
    assert {file.name for file in Path(place).iterdir()} <= hub.DESCRIPTIONS | {WEIGHTS}
    assert Path(place, WEIGHTS).read_bytes() == (BUNDLED / WEIGHTS).read_bytes()
    assert "Bearer hf_abc" in small_hub.tokens
    assert WEIGHTS in done.stderr or "Fetching" in done.stderr or "Download" in done.stderr  # a progress bar
    asked = len(small_hub.asked)
    again = find(small_hub, tmp_path)
    assert again.stdout == done.stdout and len(small_hub.asked) == asked


def test_named_chat_templates_are_downloaded(small_hub: Hub, tmp_path: Path) -> None:
    small_hub.files["additional_chat_templates/tool_use.jinja"] = b"tools"
    done = find(small_hub, tmp_path)
    assert done.returncode == 0, done.stderr
    place = Path(done.stdout.splitlines()[0])
    assert (place / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"tools"


def test_a_revision_is_part_of_the_name(small_hub: Hub, tmp_path: Path) -> None:
    assert find(small_hub, tmp_path, f"{NAME}@v1").returncode == 0
    refused = find(small_hub, tmp_path, f"{NAME}@v2")
    assert "has no revision 'v2'" in refused.stderr.splitlines()[-1]


def test_a_transfer_that_breaks_off_is_continued(small_hub: Hub, tmp_path: Path) -> None:
    whole = small_hub.files[WEIGHTS] = save({"w": np.arange(4 << 20, dtype=np.float32)})
    small_hub.torn = [12 << 20]  # more than the 10 MiB that the library writes at once
    done = find(small_hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (WEIGHTS, f"bytes={10 << 20}-") in small_hub.asked
    assert Path(done.stdout.splitlines()[0], WEIGHTS).read_bytes() == whole


def test_a_download_that_fails_leaves_nothing_broken(small_hub: Hub, tmp_path: Path) -> None:
    """The weights end early again and again, until the library gives up; the next start needs only these."""
    small_hub.torn = [1000, *[0] * 20]
    done = find(small_hub, tmp_path)
    assert done.returncode == 1 and "ModelError: the download of team/small" in done.stderr
    small_hub.torn, small_hub.asked = [], []
    again = find(small_hub, tmp_path)
    assert again.returncode == 0, again.stderr
    assert [name for name, _ in small_hub.asked] == [WEIGHTS]
    assert Path(again.stdout.splitlines()[0], WEIGHTS).read_bytes() == (BUNDLED / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("changes", "model", "said"),
    [
        ({"status": 401}, NAME, "neither a directory here nor a model at"),
        ({"gated": True}, NAME, "team/small is gated: ask for access at"),
        ({}, "team/other", "neither a directory here nor a model at"),
        ({"status": 429}, NAME, "status 429 (it limits requests"),
        ({"status": 500}, NAME, "status 500; try again later"),
    ],
)
def test_bad_answers_are_one_error_and_the_next_start_works(
    small_hub: Hub, tmp_path: Path, changes: dict[str, object], model: str, said: str
) -> None:
    for name, value in changes.items():
        setattr(small_hub, name, value)
    refused = run(small_hub, tmp_path, *LAMINA, "generate", "x", "--model", model)
    assert refused.returncode == 2 and refused.stderr.count("error:") == 1 and said in refused.stderr, refused.stderr
    small_hub.status, small_hub.gated = 200, False
    assert find(small_hub, tmp_path).returncode == 0


def test_what_is_in_the_cache_works_without_the_hub(small_hub: Hub, tmp_path: Path) -> None:
    assert find(small_hub, tmp_path, HF_HUB_OFFLINE="1").returncode == 1
    done = find(small_hub, tmp_path)
    offline = find(small_hub, tmp_path, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0 and offline.stdout == done.stdout
    small_hub.status = 500
    assert find(small_hub, tmp_path).stdout == done.stdout
    small_hub.url = "http://127.0.0.1:1"
    unreachable = find(small_hub, tmp_path)
    assert unreachable.stdout == done.stdout and "comes from the Hugging Face cache" in unreachable.stderr


def test_a_model_without_safetensors_is_refused(small_hub: Hub, tmp_path: Path) -> None:
    del small_hub.files[WEIGHTS]
    assert "has no safetensors weights" in find(small_hub, tmp_path).stderr.splitlines()[-1]


def test_a_model_that_does_not_fit_the_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    with pytest.raises(ModelError, match=r"team/small needs 5000000 bytes in .*, where 1000000 are free"):
        hub._require_room(NAME, COMMIT, {WEIGHTS: 5_000_000})


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("Qwen/Qwen3-4B", True),
        ("a/b@main", True),
        ("a/b@refs/pr/1", True),
        ("/a/b", False),
        ("./a/b", False),
        ("a", False),
    ],
)
def test_names_are_told_from_paths(model: str, named: bool) -> None:
    assert hub.is_name(model) == named


def test_models_lists_the_cache_and_what_fits(small_hub: Hub, tmp_path: Path) -> None:
    assert "No models are in" in run(small_hub, tmp_path, *LAMINA, "models").stdout
    assert find(small_hub, tmp_path).returncode == 0
    (row,) = json.loads(run(small_hub, tmp_path, *LAMINA, "models", "--json").stdout)
    assert (row["model"], row["revision"], row["why_not"]) == (NAME, COMMIT, "")
    assert row["kv_tokens"] > 1000 and 0 < row["weight_bytes"] <= row["bytes"]
    assert NAME in run(small_hub, tmp_path, *LAMINA, "models").stdout
