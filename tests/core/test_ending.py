"""Whether a process works, whatever it waits for; and an end that waits for nothing for long."""

from __future__ import annotations

import subprocess
import sys

from tests.support.runs import ROOT


def run(script: str) -> subprocess.CompletedProcess[bytes]:
    """A process of its own: the one of the tests has threads of many."""
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=False)


def test_a_thread_that_computes_is_work_and_the_one_that_asks_or_sleeps_is_none():
    script = """
import threading, time
from trainer.ending import ProcessorUse, within
def spin():
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
use = ProcessorUse()
use.is_working()
worker = threading.Thread(target=spin)
worker.start()
worker.join()
assert use.is_working()
spin()
time.sleep(0.5)
assert not use.is_working()
threading.Thread.start = worker.start  # a RuntimeError: it has ended
assert not within(1.0, print)
"""
    assert run(script).returncode == 0


def test_a_process_ends_although_its_last_words_and_its_stdout_block():
    script = """
import sys, time, trainer.ending as ending
ending.LAST_WORDS_SEC = ending.FLUSH_SEC = 0.2
class Blocked:
    flush = write = lambda *_: time.sleep(3600)
sys.stdout = Blocked()
ending.end_process(7, lambda: time.sleep(3600))
"""
    assert run(script).returncode == 7
