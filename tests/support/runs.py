"""Small corpora, small configs, and real runs of the program, for tests that use it as its users do."""

from __future__ import annotations

import atexit
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.support.forks import Forked, Member, count_launch, wait_as_torchrun

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROGRAM = ROOT / "train"
TIMEOUT_SEC = 600

TINY = Path(__file__).with_name("tiny.toml.in").read_text(encoding="utf-8")


def make_corpus(root: Path, *, streams: int = 4, documents: int = 12, seed: int = 0) -> Path:
    """A NESTED corpus of words in two modalities, a and b; the same arguments give the same bytes."""
    words = np.array(["the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with"])
    generator = np.random.Generator(np.random.Philox(seed))
    for modality in ("a", "b"):
        directory = root / modality
        directory.mkdir(parents=True)
        for stream in range(streams):
            lines = []
            for _ in range(documents):
                length = int(generator.integers(3, 80))
                lines.append(json.dumps({"text": " ".join(generator.choice(words, length))}))
            (directory / f"stream{stream}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


EVERY_FILE = ["metrics.stdout=off", "eval.every=2", "eval.holdout_fraction=0.2", "checkpoint.every=2"]
"""Settings of a short run that writes all files of its directory."""
FULL_ROWS = 'data.mixing={batching_mode="per_row", batch_size=4, num_streams_mixed=2}'
"""Documents begin within rows."""


def write_tiny_config(directory: Path, extra: str = "") -> Path:
    """A config for a run of seconds on a corpus beside it; `extra` is TOML that follows."""
    corpus = directory / "corpus"
    if not corpus.exists():
        make_corpus(corpus)
    path = directory / "tiny.toml"
    path.write_text(TINY.format(runs=directory / "runs", corpus=corpus) + extra, encoding="utf-8")
    return path


def evaluating(every: int, *, batches: int = 2, saves: int = 0, keep_last: int = 0) -> str:
    """TOML for the end of a tiny config: evaluations of held-out documents, and checkpoints, every so many steps."""
    text = f"\n[eval]\nevery = {every}\nbatches = {batches}\nholdout_fraction = 0.2\n"
    if saves:
        text += f"\n[checkpoint]\nevery = {saves}\n"
    if keep_last:
        text += f"keep_last = {keep_last}\n"
    return text


def held_out_documents(directory: Path, fraction: float) -> dict[tuple[str, int], bytes]:
    """(file, number) -> text of the held-out documents of the corpus below a directory, from its files."""
    from trainer.data.groups import held_out

    found = {}
    for file in sorted((directory / "corpus").rglob("*.jsonl")):
        lines, name = file.read_text().splitlines(), str(file.relative_to(directory / "corpus"))
        for number in np.flatnonzero(held_out(name, len(lines), fraction)).tolist():
            found[name, number] = json.loads(lines[number])["text"].encode()
    return found


def held_out_texts(directory: Path, fraction: float) -> list[bytes]:
    return [*held_out_documents(directory, fraction).values()]


def losses_of_documents(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The lines that an evaluation has written."""
    path = run_dir / "evaluations" / f"step_{step:08d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a child: one thread, nothing of a launcher, no network."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH")}
    return {**inherited, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "NO_COLOR": "1", **(extra or {})}


def command(arguments: Sequence[object], *, nproc: int | None = None) -> list[str]:
    """The command line: the program itself, or torchrun with `nproc` ranks of it."""
    program = [str(PROGRAM), *map(str, arguments)]
    if nproc is None:
        return [sys.executable, *program]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [*torchrun, *program]


_reserved: deque[socket.socket] = deque(maxlen=256)


def free_port() -> int:
    """A port of the loopback that the system gives to nobody else meanwhile, for a server that reuses addresses.

    The socket stays bound, and does not listen: until a server does, another process could be given the port.
    """
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", 0))
    _reserved.append(found)
    return int(found.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher tells one of its ranks, on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


_group: list[Member] = []


def group_of(size: int) -> list[Member]:
    """Processes that wait for runs, as many as asked for; those that have ended meanwhile are replaced."""
    missing = [place for place in range(max(size, 4)) if not _group[place:] or not _group[place].is_alive]
    if missing:
        count_launch()
    # Each keeps its rank: torch would give it again the device mesh of its first run, with the groups of that rank.
    for place in missing:
        _group[place : place + 1] = [Member()]
    return _group[:size]


@atexit.register
def end_group() -> None:
    """End them, before multiprocessing waits for them."""
    for member in _group:
        member.end()


def run(
    *arguments: object,
    nproc: int | None = None,
    cwd: Path | None = None,
    extra: Mapping[str, str] | None = None,
    code: str = "",
    is_alone: bool = False,
    out: Path | None = None,
    err: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the program to its end, in one process or as `nproc` ranks.

    Any number of runs share one group of forked ranks. Each has its own environment, working directory, command line, output,
    modules of a test's own, and port; what else a process keeps (what a run has patched, threads left behind) stays.

    Args:
        extra: environment variables.
        code: Python that runs in the program's place.
        is_alone: in processes that end with the run.
        out, err: where its output goes, rather than into the result; for a run that is alone, since a group keeps them open.
    """
    world_size, port, line = nproc or 1, free_port(), list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        places = {"out": out or Path(folder, "out"), "err": err or Path(folder, "err")}
        for place in places.values():
            place.touch()
        options: Any = {"cwd": cwd or Path.cwd(), **places, "code": code}
        ranks: list[Member] = [] if is_alone else group_of(world_size)
        for rank in range(world_size):
            own = environment({**(rank_environment(rank, world_size, port) if nproc else {}), **(extra or {})})
            if is_alone:
                ranks.append(Forked(line, own, **options))
            else:
                ranks[rank].begin(line, own, **options)
        status = wait_as_torchrun(ranks, TIMEOUT_SEC)
        texts = [place.read_text() if place.parent == Path(folder) else "" for place in places.values()]
        return subprocess.CompletedProcess(line, status, *texts)


def fresh(line: Sequence[object], *, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    """A fresh process, to its end: where its start itself matters, or what it has imported. `extra`: environment variables."""
    options: Any = {"env": environment(extra), "cwd": cwd, "timeout": TIMEOUT_SEC, "check": False}
    return subprocess.run([*map(str, line)], capture_output=True, text=True, **options)


def overrides(*sets: str) -> list[str]:
    """`--set` for each."""
    return [word for each in sets for word in ("--set", each)]


def train(config: Path, run_dir: Path, *sets: str, more: tuple[object, ...] = (), code: int = 0, **options: Any) -> str:
    """Train into `run_dir` with overrides of the config and `more` words; returns stderr. `code`: how it must end;
    `options`: those of `run`."""
    line = ("--config", config, "--run-dir", run_dir, "--stdout", "off", *overrides(*sets), *more)
    done = run(*line, **options)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr


def read_rows(metrics: Path) -> dict[tuple[str, int], dict[str, float]]:
    """(mode, step) -> metrics of a metrics.jsonl; of a step that was logged twice the later row counts."""
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        payload: dict[str, Any] = json.loads(line)
        if "metrics" in payload:
            rows[payload["mode"], payload["global_step"]] = payload["metrics"]
    return rows


def losses(metrics: Path) -> dict[int, float]:
    """Step -> training loss."""
    return {step: row["loss"] for (mode, step), row in read_rows(metrics).items() if mode == "train"}


def run_example(name: str, *arguments: object, prelude: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run an example to its end. `prelude` is Python that runs before it in its process; `options` are those of `run`."""
    script = EXAMPLES / name
    code = f"import runpy, sys\nsys.path.insert(0, {str(script.parent)!r})\n{prelude}\n"
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    return run(*arguments, code=code, is_alone=True, **options)


def printed_by(name: str, *arguments: object) -> str:
    """What an example prints, run to its end in this process."""
    with redirect_stdout(io.StringIO()) as out, patch.object(sys, "argv", [name, *map(str, arguments)]):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()
