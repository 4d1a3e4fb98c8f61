"""`train compare` on three runs and more, as its users meet it."""

from __future__ import annotations

import tomllib

import pytest
import tomli_w

from tests.support.in_process import program
from tests.support.records import write_record

LOSSES = {("fast", 1): 2.1, ("fast", 2): 2.3, ("fast", 3): 2.2, ("slow", 1): 2.25, ("slow", 2): 2.35, ("bad", 1): 9.0}
RATES = {"fast": 0.02, "slow": 0.01, "bad": 1.0}


@pytest.fixture
def runs(tmp_path):
    for (name, seed), held_out in LOSSES.items():
        config = {"run": {"name": f"{name}-{seed}", "seed": seed}, "optimizer": {"lr": RATES[name]}}
        train, evals = {"loss": [3.0, 3.0], "tokens_seen": [8.0, 16.0]}, {2: {"eval_loss": held_out}}
        write_record(tmp_path / f"{name}-{seed}", train, evals, config=config, status={"state": "done"})
    return sorted(tmp_path.iterdir())


def test_seeds_are_grouped_ranked_and_small_differences_marked(runs, capsys):
    done = program(["compare", *runs], capsys)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    fast, slow, bad = (next(n for n, line in enumerate(lines) if f" {rate} " in line) for rate in RATES.values())
    assert fast < slow < bad
    assert "2.2 ± 0.1" in lines[fast]
    assert "2.3 ± 0.071" in lines[slow]
    assert "+0.1 ± 0.076" in lines[slow]
    assert "may be chance" in lines[slow + 1]
    assert "9 " in lines[bad]
    assert "±" not in lines[bad]
    assert "no error bar" in lines[bad + 1]
    assert "one seed has no error bar" in done.stdout


def test_columns_sets_the_width_in_a_pipe_and_without_it_nothing_is_left_out(runs, capsys, monkeypatch):
    for run in runs:
        config = tomllib.loads((run / "config.resolved.toml").read_text())
        config["model"] = {f"a_rather_long_setting_{n}": f"{config['optimizer']['lr']} {'x' * 20}" for n in range(6)}
        (run / "config.resolved.toml").write_bytes(tomli_w.dumps(config).encode())
    whole = program(["compare", *runs], capsys).stdout
    assert "omitted" not in whole
    assert max(map(len, whole.splitlines())) > 120
    monkeypatch.setenv("COLUMNS", "80")
    narrow = program(["compare", *runs], capsys).stdout
    assert max(map(len, narrow.splitlines())) <= 80
    assert "model.a_rather_long_setting_5" in "".join(narrow.partition("omitted to fit the terminal")[2].split())
    assert "2.2 ± 0.1" in narrow
    monkeypatch.setenv("COLUMNS", "wide")
    assert program(["compare", *runs], capsys).stdout == whole
