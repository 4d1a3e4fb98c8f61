"""SIGKILL at random moments: every resume succeeds, and the end is that of the run nobody touched, bit for bit."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.fault_runs import ARGUMENTS, STEPS, assert_same, end_with, keep, make_config, whole_run
from tests.support.ranks import Ranks, is_saving, last_logged, wait_while_starting

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]
KILLS_A_CHAIN = 10
MOMENTS = {"start": "starting up", "step": "in steps", "save": "inside a checkpoint's writing"}
RENDEZVOUS_SEC = 30
CHAINS = {"plain": (), "often": ("--set", "checkpoint.every=1")}
STRATEGIES = {"ddp": (), "fsdp": ("--set", 'distributed.strategy="fsdp"')}


@pytest.fixture(scope="module", params=STRATEGIES)
def untouched(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("untouched")
    config = make_config(directory)
    return config, whole_run(config, directory / "run", *STRATEGIES[request.param]), request.param


def strike(ranks: Ranks, run_dir: Path, moment: str, chance: random.Random) -> str:
    """Kill one rank or all at a moment that `chance` picks; returns what was hit, or "" if the run was done before."""
    victims = chance.choice([None, None, [0], [1]])
    if moment == "start":
        wait_while_starting(ranks, run_dir, chance.uniform(0.0, 8.0))
    elif moment == "save":
        # Not the first save it comes to, so that the chain advances, and not at its beginning alone.
        first = last_logged(run_dir / "metrics.jsonl") + chance.randint(0, 8)
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= min(first, STEPS - 2))
        ranks.until(lambda: is_saving(run_dir), poll_sec=0.0002)
        time.sleep(chance.uniform(0.0, 0.006))
    else:
        first = last_logged(run_dir / "metrics.jsonl") + chance.randint(1, 9)
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= min(first, STEPS - 2))
        time.sleep(chance.uniform(0.0, 0.02))
    was_running = ranks.is_running
    ranks.signal(signal.SIGKILL, victims)
    # Nobody but themselves ends the others: there is no torchrun. One that waits for a dead rank to come to the rendezvous
    # waits for as long as for a collective.
    ranks.wait(RENDEZVOUS_SEC + 60)
    if not was_running:
        return ""
    hit = "save" if is_saving(run_dir) else "start" if moment == "start" else "step"
    return f"{hit} {'all' if victims is None else 'one'}"


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_killed_ten_times_ends_as_the_one_nobody_touched(untouched, tmp_path, chain):
    config, whole, strategy = untouched
    run_dir = tmp_path / "run"
    arguments = ("--config", config, "--run-dir", run_dir, "--resume", "auto", *ARGUMENTS, *CHAINS[chain])
    arguments += (*STRATEGIES[strategy], "--set", f"distributed.timeout_sec={RENDEZVOUS_SEC}")
    chance = random.Random(f"kill {chain}" if strategy == "ddp" else f"kill {strategy} {chain}")
    hits: list[str] = []
    needs_saves = KILLS_A_CHAIN if (strategy, chain) == ("fsdp", "often") else 0
    while len(hits) < KILLS_A_CHAIN or sum(hit.startswith("save") for hit in hits) < needs_saves:
        moment = "save" if needs_saves else chance.choices(["start", "step", "save"], weights=[1, 3, 4])[0]
        with Ranks(arguments, logs=tmp_path / f"try{len(hits)}", is_fresh=moment == "start") as ranks:
            hit = strike(ranks, run_dir, moment, chance)
            assert hit, f"the run was done after {len(hits)} kills\n{ranks.said()}"
            hits.append(hit)
    end_with(0, arguments, tmp_path / "last")
    assert_same(whole, run_dir, STEPS)
    for victims in ("all", "one"):
        count = {what: hits.count(f"{moment} {victims}") for moment, what in MOMENTS.items()}
        where = ", ".join(f"{times} {what}" for what, times in count.items() if times)
        ranks_hit = "all ranks" if victims == "all" else "one rank of two"
        shards = " of shards (fsdp)" if strategy == "fsdp" else ""
        keep(1, f"SIGKILL of {ranks_hit}, {chain} checkpoints{shards}: {where}", times=sum(count.values()))
