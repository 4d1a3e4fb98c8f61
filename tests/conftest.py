"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from scripts.check_budgets import CEILINGS
from tests.support.forks import LAUNCHES, count_subprocess
from tests.support.long_tests import is_left
from trainer.cli import parts as parts  # all formats

if TYPE_CHECKING:
    import torch

# An example that takes long says something about the machine's load, nothing about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


# Neither a login of this machine's user nor a service process per run; tests of wandb itself name a mode.
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as make test has it; read when torch is imported
os.environ.pop("COLUMNS", None)  # some shells export their terminal's width
os.environ.pop("PYTEST_ADDOPTS", None)  # has been read, and is not meant for the pytest that a test starts
# A shell without job control starts what is in the background with SIGINT ignored, nohup with SIGHUP, and every program that
# a test starts and stops would inherit it. One that is handled here is not ignored there; nohup's still has no effect here.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Files go to the workers whole and in this order: one that takes long must not be the last to begin.
LONGEST_FIRST = (
    *("golden", "distributed", "cuda", "diagnostics", "training", "examples", "model"),
    *("science", "properties", "cli", "scripts"),
)

pytest_plugins = ("tests.support.in_process",)

gc.disable()  # while tests are collected, which imports all there is


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and mark as slow what takes long."""
    tests, seen = Path(__file__).parent, Counter[tuple[str, str]]()
    for item in items:
        file, name = item.path.relative_to(tests).as_posix(), item.originalname
        if is_left(file, name, seen[file, name]):
            item.add_marker(pytest.mark.slow)
        seen[file, name] += item.get_closest_marker("slow") is None

    # A folder that is not in the list comes last.
    items.sort(key=lambda item: [*LONGEST_FIRST, item.path.parent.name].index(item.path.parent.name))


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: there is a million of it, and it stays."""
    gc.freeze()
    gc.enable()


MOST_LAUNCHES, _ = CEILINGS["launches in make test"]
sys.addaudithook(count_subprocess)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker has counted."""
    LAUNCHES.update(getattr(node, "workeroutput", {}).get("launches", {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of the suite that starts more programs than it may."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launches"] = dict(LAUNCHES)
    elif LAUNCHES.total() > MOST_LAUNCHES and not session.config.option.markexpr.startswith(("slow", "faults")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the launches, and who makes most of them."""
    most = ", ".join(f"{path.removeprefix('tests/')} {number}" for path, number in LAUNCHES.most_common(5))
    terminalreporter.write_line(f"launches: {LAUNCHES.total()} of at most {MOST_LAUNCHES} in make test ({most})")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tests marked `cuda` run: on the device that TRAINER_TEST_DEVICE names, on the CPU without it."""
    import torch

    if os.environ.get("TRAINER_TEST_DEVICE", "cpu") == "cpu":
        return torch.device("cpu")
    assert torch.cuda.is_available(), "TRAINER_TEST_DEVICE=cuda, but torch finds no CUDA device"
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def chosen_device(device: torch.device) -> torch.device:
    """The same, for tests that take long and prove on the CPU what others have proven: only where a device is named."""
    if "TRAINER_TEST_DEVICE" not in os.environ:
        pytest.skip("takes long: set TRAINER_TEST_DEVICE=cpu, or use make gpu DEVICE=cpu")
    return device
