"""The server of `train report --follow`: two routes, for this machine alone."""

from __future__ import annotations

import http.client
import json
import socket
import threading

import pytest

from trainer.errors import UserError
from trainer.tools.report.follow import Follower
from trainer.tools.report.serve import ReportServer


@pytest.fixture
def server(make_run):
    run = make_run("a", {"loss": [3.0, 2.0]})
    with ReportServer(Follower([str(run.path)]), plotly="var plotly_is_here;", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers={"Host": f"127.0.0.1:{server.server_port}", **headers})
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def test_the_page_and_its_parts_are_the_only_content(server):
    status, headers, body = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"plotly_is_here" in body
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    status, headers, body = ask(server, "/parts?since=0")
    found = json.loads(body)
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    assert json.loads(ask(server, f"/parts?since={found['version']}")[2]).keys() == {"version", "line"}


@pytest.mark.parametrize(
    "path",
    ["/metrics.jsonl", "/../metrics.jsonl", "//etc/passwd", "/%2e%2e/a/metrics.jsonl", "/parts/", "http://other/", "*"],
)
def test_no_other_path_has_content(server, path):
    assert ask(server, path)[::2] == (404, b"not found\n")


@pytest.mark.parametrize("path", ["/", "/parts?since=0", "/nothing"])
def test_head_is_answered_as_get_without_the_body(server, path):
    whole, head = ask(server, path), ask(server, path, "HEAD")
    for _, headers, _ in (whole, head):
        headers.pop("Date")
    assert head == (*whole[:2], b"")
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(f"HEAD {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.endswith(b"\r\n\r\n")


def test_head_tells_another_name_for_this_machine_nothing(server):
    assert ask(server, "/", "HEAD", Host="evil.example")[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(server, method):
    assert ask(server, "/", method)[0] == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:9000", 200), ("127.0.0.1", 200),
        ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil.example:80", 403), ("", 403),
        ("evil.example:127.0.0.1", 403), ("0.0.0.0", 403),
    ],
)  # fmt: skip
def test_another_name_for_this_machine_is_refused(server, host, status):
    for path in ("/", "/parts"):
        found, _, body = ask(server, path, Host=host)
        assert found == status
        assert (b"loss" in body) == (status == 200)


@pytest.mark.parametrize("hosts", ["", "Host: localhost\r\nHost: evil.example\r\n"])
def test_a_request_without_one_host_is_refused(server, hosts):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(f"GET / HTTP/1.0\r\n{hosts}\r\n".encode())
        assert b" 403 " in connection.recv(100)


def test_only_the_loopback_is_served(server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_a_client_that_leaves_does_not_end_the_server(server, capsys):
    for _ in range(3):
        connection = socket.create_connection(("127.0.0.1", server.server_port))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.close()
    assert ask(server, "/")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_port_in_use_is_a_mistake_of_one_line(server, make_run):
    follower = Follower([str(make_run("b", {"loss": [1.0]}).path)])
    with pytest.raises(UserError, match=r"--port: .*in use; name another, or 0 for a free one"):
        ReportServer(follower, plotly="", port=server.server_port)
