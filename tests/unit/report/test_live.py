"""A run that is followed: what the page is given while the files change, and to whom."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
from html import escape, unescape

import pytest

from trainer.errors import UserError
from trainer.metrics.payload_contract import build_payload, build_restart, encode_payload
from trainer.metrics.run_status import take_lock
from trainer.tools.report.live import BUSY_FACTOR, Follower, ReportServer


def line(step, loss=None):
    return encode_payload(build_payload("train", step, {"loss": loss or 10.0 - step})) + "\n"


class Followed:
    """A run directory, its follower, and the page's questions; each reading of the clock takes `takes` seconds."""

    def __init__(self, directory):
        self.directory, self.now, self.takes = directory, 100.0, 0.0
        directory.mkdir()
        self.lock = take_lock(directory)  # or a run that says "running" counts as dead
        self.metrics = directory / "metrics.jsonl"

    def clock(self):
        self.now += self.takes
        return self.now

    def start(self):
        self.follower = Follower([str(self.directory)], clock=self.clock)
        self.version = self.follower.version()
        return self

    def write(self, text, mode="a"):
        with self.metrics.open(mode, encoding="utf-8") as file:
            file.write(text)

    def status(self, state, time=0.0, reason=""):
        value = {"state": state, "reason": reason, "last_step": 1, "time": time}
        (self.directory / "status.json").write_text(json.dumps(value))

    def news(self, wait=1000.0):
        """The page, if it is another one by now."""
        self.now += wait
        before, self.version = self.version, self.follower.version()
        return "" if self.version == before else self.page()

    def page(self):
        return self.follower.page(plotly="var plotly;")


@pytest.fixture
def run(tmp_path):
    return Followed(tmp_path / "run")


def live_line(page):
    return unescape(re.search(r'<p id="live"[^>]*>(.*?)</p>', page)[1])


def test_a_resumed_run_and_a_truncated_file_are_read_anew(run):
    run.write("".join(line(step) for step in range(1, 7)))
    run.start()
    run.write(encode_payload(build_restart(3)) + "\n" + line(4, 9.0))
    page = run.news()
    assert '"text":"restart"' in page
    assert "replaced by later rows" in page
    run.write(line(1) + line(2), mode="w")
    assert "2 rows, steps 1 to 2" in run.news()


def test_a_directory_that_is_gone_leaves_the_page_as_it_was_and_may_come_back(run):
    run.write(line(1) + line(2))
    run.start()
    kept = run.directory.with_name("moved")
    run.directory.rename(kept)
    page = run.news()
    assert live_line(page) == "run: is gone; the page shows what was read before"
    assert "2 rows, steps 1 to 2" in page
    shutil.copytree(kept, run.directory)
    run.write(line(3))
    page = run.news()
    assert "3 rows, steps 1 to 3" in page
    assert "gone" not in live_line(page)


def test_a_heartbeat_is_no_news_and_the_end_is(run):
    run.write(line(1))
    run.status("running")
    run.start()
    run.status("running", time=5.0)
    assert not run.news()
    run.status("done", reason="all steps are done")
    assert live_line(run.news()) == "run has ended at step 1: done, all steps are done"
    run.status("running")
    assert "running at step 1, read at " in live_line(run.news())
    run.lock.close()  # a process that is killed writes nothing
    assert "has ended at step 1: died, process" in live_line(run.news())


def test_reading_pauses_in_proportion_to_how_long_it_takes(run):
    run.takes = 3.0
    run.write(line(1))
    run.start()
    run.write(line(2))
    assert run.news()
    run.write(line(3))
    assert not run.news(wait=BUSY_FACTOR * 3.0 - 20.0)
    assert run.news(wait=20.0)


def test_a_run_that_does_not_exist_yet_is_waited_for(run):
    shutil.rmtree(run.directory)
    run.start()
    assert live_line(run.page()) == f"run: waiting for {run.directory}, which does not exist yet"
    run.directory.mkdir()
    assert live_line(run.news()).startswith("run: state not known, no row yet")
    run.write(line(1) + line(2))
    assert "2 rows, steps 1 to 2" in run.news()


def test_a_path_in_a_directory_that_does_not_exist_is_refused_at_the_start(tmp_path):
    with pytest.raises(UserError, match="is neither a run directory nor a file"):
        Follower([str(tmp_path / "nowhere" / "run")])


@pytest.fixture
def server(make_run):
    run = make_run("a", {"loss": [3.0, 2.0]})
    with ReportServer(Follower([str(run.path)]), plotly="var plotly_is_here;", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers={"Host": f"127.0.0.1:{server.server_port}", **headers})
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def test_the_page_is_the_only_content(server):
    status, headers, body = ask(server)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"plotly_is_here" in body
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    status, headers, nothing = ask(server, method="HEAD")
    assert (status, nothing) == (200, b"")
    assert f'data-version="{escape(headers["ETag"])}"'.encode() in body
    for path in ("/metrics.jsonl", "/%2e%2e/a/metrics.jsonl", "/parts"):
        assert ask(server, path)[::2] == (404, b"not found\n")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("LOCALHOST:9000", 200), ("127.0.0.1", 200), ("localhost.evil.example:80", 403), ("", 403),
        ("evil.example:127.0.0.1", 403), ("0.0.0.0", 403),
    ],
)  # fmt: skip
def test_another_name_for_this_machine_is_refused(server, host, status):
    found, _, body = ask(server, Host=host)
    assert (found, b"loss" in body) == (status, status == 200)
    assert ask(server, method="HEAD", Host=host)[0] == status


def test_a_port_in_use_is_a_mistake_of_one_line(server, make_run):
    follower = Follower([str(make_run("b", {"loss": [1.0]}).path)])
    with pytest.raises(UserError, match=r"--port: .*in use; name another, or 0 for a free one"):
        ReportServer(follower, plotly="", port=server.server_port)
