"""A stand-in for wandb's server on loopback: the part of its HTTP API that wandb's own client uses in a run.

The client asks by GraphQL whether a run exists (`RunResumeStatus`), creates or updates it (`UpsertBucket`), asks where to
upload files (`CreateRunFiles`) and sends rows to `/files/<entity>/<project>/<run>/file_stream`: for each file the number of
its first line and the lines themselves. Rows are kept by that number, as the server does, so that lines sent twice are
lines kept once, and a client that starts to count at the wrong place after a resume overwrites what was there.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

ENTITY = "tester"
HISTORY = "wandb-history.jsonl"
SUMMARY = "wandb-summary.json"
API_KEY = "a" * 40


@dataclass
class StubRun:
    """What the server holds of one run."""

    name: str
    project: str
    display_name: str = ""
    config: str = "{}"
    files: dict[str, dict[int, str]] = field(default_factory=dict)
    """File -> line number -> line."""
    summary: str = "{}"
    is_complete: bool = False
    exit_code: int | None = None

    def lines(self, file: str) -> list[str]:
        """The lines of a file in order; a hole between them is an error of the client."""
        kept = self.files.get(file, {})
        assert sorted(kept) == list(range(len(kept))), f"{file}: lines {sorted(kept)} have a hole"
        return [kept[number] for number in sorted(kept)]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The logged rows."""
        return [json.loads(line) for line in self.lines(HISTORY)]


class WandbStub:
    """Serves until `stop()`; use as a context manager.

    Attributes:
        runs: by name, which is the client's run id.
        authorizations: every value of that header.
    """

    def __init__(self) -> None:
        self.runs: dict[str, StubRun] = {}
        self.authorizations: set[str | None] = set()
        self._lock = threading.Lock()
        stub = self

        class Handler(_Handler):
            owner = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """The base address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Go away as a killed server does: the port is closed, and open connections answer nothing more."""
        if self.thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self.thread.join()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """The answer to one request."""
        with self._lock:
            if path.startswith("/graphql"):
                return {"data": self._graphql(json.loads(body))}
            if path.endswith("/file_stream"):
                return self._file_stream(path.split("/")[-2], json.loads(body))
            return {}

    def _graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        operation, variables = request.get("operationName") or "", request.get("variables") or {}
        if operation == "RunResumeStatus":
            run = self.runs.get(variables["name"])
            return {"model": {**_project(variables["project"]), "bucket": _resumed(run) if run else None}}
        if operation == "UpsertBucket":
            return {"upsertBucket": self._upsert(variables)}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        return {}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        is_new = name not in self.runs
        run = self.runs.setdefault(name, StubRun(name, variables["project"]))
        run.display_name = variables.get("displayName") or run.display_name
        run.config = variables.get("config") or run.config
        bucket = {**_identity(run), "description": None, "sweepName": None, "config": run.config}
        return {"bucket": {**bucket, "historyLineCount": len(run.files.get(HISTORY, {}))}, "inserted": is_new}

    def _file_stream(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        run = self.runs[name]
        for file, part in (request.get("files") or {}).items():
            if file == SUMMARY:
                run.summary = part["content"][-1]
            kept = run.files.setdefault(file, {})
            for number, line in enumerate(part["content"], start=part["offset"]):
                kept[number] = line
        if request.get("complete"):
            run.is_complete, run.exit_code = True, request.get("exitcode")
        return {"limits": {}}


def _project(name: str) -> dict[str, Any]:
    return {"id": "project-id", "name": name, "entity": {"id": "entity-id", "name": ENTITY}}


def _identity(run: StubRun) -> dict[str, Any]:
    return {"id": f"id-{run.name}", "name": run.name, "displayName": run.display_name, "project": _project(run.project)}


def _resumed(run: StubRun) -> dict[str, Any]:
    """What a client is told about a run that it goes on with."""
    history = run.lines(HISTORY)
    events = run.files.get("wandb-events.jsonl", {})
    tails = {
        "historyTail": json.dumps(history[-1:]),
        "eventsTail": json.dumps([events[k] for k in sorted(events)[-1:]]),
    }
    counts = {"historyLineCount": len(history), "eventsLineCount": len(events), "logLineCount": 0}
    told = {"summaryMetrics": run.summary, "config": run.config, "tags": [], "notes": None}
    return {**_identity(run), **counts, **tails, **told, "wandbConfig": json.dumps({"t": 1})}


class _Handler(BaseHTTPRequestHandler):
    owner: WandbStub
    protocol_version = "HTTP/1.1"

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.owner.thread.is_alive():
            self.close_connection = True
            return
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.owner.authorizations.add(self.headers.get("Authorization"))
        answer = json.dumps(self.owner.answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = _respond

    def handle(self) -> None:
        """Serve a connection until the client hangs up, in whichever way."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Nothing: a test's own output stays readable."""
