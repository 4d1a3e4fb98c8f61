"""`train replay`, `train data at` and `train bisect`: a step again, to the bit, and where two runs part."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.core.distributed.test_data_shards import EXTRA as EVERY_FOURTH
from tests.support.grouped import train
from tests.support.runs import FULL_ROWS, ROOT, write_tiny_config
from tests.support.runs import run as launched
from trainer.tools.verbs.branching import _comparison

pytestmark = pytest.mark.distributed

EXTRA = f"{EVERY_FOURTH}keep_last = 9\n"
SETS = ("train.steps=8", "metrics.log_interval=3", "metrics.digests=write", "train.spike_sigma=2")
OWN = "model.target=tests.support.models:{}", "model.contract=false", "gns.enabled=false"
DROPOUT = (OWN[0].format("dropout"), *OWN[1:])
# Ranks, the step that is repeated, settings.
CASES: Mapping[str, tuple[int | None, int, tuple[str, ...]]] = {
    "ddp": (2, 6, ("distributed.shards=4", "data.mixing.batch_size=2")),
    "fsdp": (2, 3, ("distributed.strategy=fsdp", "ledger.ownership=exchange", "scheduler.name=cosine")),
    "full rows": (None, 6, (FULL_ROWS, "data.seq_len=256", "objective.z_loss=0.01")),
    "growing": (None, 6, ("train.micro_batches={schedule='step', points={0=1, 5=2}}", "train.tbptt_cells=2")),
    "dropout": (None, 6, DROPOUT),
    "from the start": (
        None,
        3,
        ("train.tokens=900", "train.steps=0", "metrics.per_layer=true"),
    ),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("replay"), EXTRA)


def answer(by: Callable[..., Any], *words: object, cwd: Path = ROOT, code: int = 0) -> Any:
    """What a verb prints as JSON."""
    done = by(*words, "--trust-code", "--json", cwd=cwd)
    assert done.returncode == code, done.stderr[-2000:]
    return json.loads(done.stdout)


def contents(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def mean_loss(rows: list[dict[str, Any]]) -> float:
    return sum(row["loss"] * row["tokens"] for row in rows if row["tokens"]) / sum(row["tokens"] for row in rows)


def corpus_text(corpus: Path, row: Mapping[str, Any]) -> list[str]:
    """The text of a row's documents, from the files."""
    found = []
    for each in row["documents"]:
        lines = (corpus / each.get("stream", row["stream"])).read_text().splitlines()
        found.append(json.loads(lines[each["document"]])["text"][each["start"] : each["stop"]])
    return found


@pytest.mark.parametrize("case", [*CASES, pytest.param("ddp, launched", marks=pytest.mark.slow)])
def test_a_step_is_repeated_to_the_bit_and_the_run_is_left_alone(config, tmp_path, verb, case):
    case, _, is_launched = case.partition(", ")
    ranks, step, sets = CASES[case]
    train(config, tmp_path / "run", *SETS, *sets, nproc=ranks)
    before = contents(tmp_path)
    # In processes of its own, which it starts itself, once.
    by = launched if is_launched else verb
    found = answer(by, "replay", tmp_path / "run", "--step", step, "--text")
    read = answer(verb, "data", "at", tmp_path / "run", step, "--text")["rows"]
    assert contents(tmp_path) == before
    assert (found["is_equal"], found["from_step"]) == (True, step - step % 4 if step > 4 else 0)
    assert step in found["compared_steps"]
    values = found["values"]
    assert {"batch", "states", "gradient", "weights", "loss", "grad_norm", "lr"} <= values.keys()
    assert all(now == then for now, then in values.values())
    rows, num_tokens = found["rows"], values["tokens_in_step"][1]
    assert sum(row["tokens"] for row in rows) == num_tokens
    if case != "full rows":  # whose loss has a z-loss, too
        assert mean_loss(rows) == pytest.approx(values["loss"][1], rel=1e-6)
    for row in rows:
        assert [each["text"] for each in row["documents"]] == corpus_text(config.parent / "corpus", row)
        assert sum(each["stop"] - each["start"] for each in row["documents"]) == row["tokens"]
        assert case == "dropout" or row.pop("state") == ("carried" if row["cell"] else "fresh")
        row.pop("loss")
    assert read == rows
    if case == "ddp":  # in one process, with digests that do not compare
        one = answer(verb, "replay", tmp_path / "run", "--step", step, "--nproc", 1, "--text")
        assert (one["is_equal"], "weights" in one["values"]) == (None, False)
        assert one["values"]["batch"] == found["values"]["batch"]
        said = verb("replay", tmp_path / "run", "--step", step, "--nproc", 1).stdout
        assert "the same batches; on another number of ranks sums are rounded otherwise" in " ".join(said.split())
        assert mean_loss(one["rows"]) == pytest.approx(values["loss"][1], rel=1e-6)
        assert [row["documents"] for row in one["rows"]] == [row["documents"] for row in found["rows"]]
    assert case != "full rows" or any(len(row["documents"]) > 1 for row in rows)


SICK = """
import torch
from trainer.model.encoder import RecurrentEncoder
from trainer.model import build as build_reference

class Sick(RecurrentEncoder):
    def forward(self, tokens, state=None, resets=None):
        output = super().forward(tokens, state, resets)
        bad, logits = (tokens == ord("#")).any(1), output.logits.clone()
        if self.fault == "error" and bad.any():
            raise ValueError("cannot read #")
        logits[bad] = torch.nan if self.fault == "loss" else logits[bad] + (0 * logits[bad]).sqrt()
        return output._replace(logits=logits)

def build(vocab_size, dim, num_layers, *, fault):
    model = build_reference(vocab_size, dim, num_layers)
    model.__class__, model.fault = Sick, fault
    return model
"""


@pytest.mark.parametrize("fault", ["error", "loss", "gradient"])
def test_the_row_that_broke_a_run_is_shown(tmp_path, verb, fault):
    raises = fault == "error"
    config = write_tiny_config(tmp_path, EXTRA)
    (tmp_path / "sick.py").write_text(SICK)
    for file in (tmp_path / "corpus").rglob("stream2.jsonl"):
        lines = file.read_text().splitlines()
        lines = [
            json.dumps({"text": f"a word and # in the first cells {n}"}) if n % 4 == 3 else each
            for n, each in enumerate(lines)
        ]
        file.write_text("\n".join(lines) + "\n")
    sets = ("model.target=sick:build", f"model.args={{fault='{fault}'}}", "model.contract=false")
    train(config, tmp_path / "run", *sets, "train.steps=60", "eval.every=0", code=1, cwd=tmp_path)
    step = json.loads((tmp_path / "run" / "status.json").read_text())["last_step"] + raises
    command = ("replay", str(tmp_path / "run"), "--step", str(step))
    if not raises:
        events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
        assert [each["replay"].split() for each in events if each["event"] == "non_finite"] == [["train", *command]]
    untrusted = verb(*command, cwd=tmp_path)
    assert (untrusted.returncode, "--trust-code" in untrusted.stderr) == (2, True)
    found = answer(verb, *command, cwd=tmp_path)
    bad = [row for row in found["rows"] if row.get("loss", "nan") == "nan" or (fault in row and fault == "gradient")]
    sick = [each["document"] % 4 == 3 for row in bad for each in row["documents"]]
    assert all(sick) if fault == "loss" else any(sick)
    if raises:
        assert found["failure"] == "ValueError: cannot read #"
        return
    assert found["is_equal"]
    assert found["values"]["loss" if fault == "loss" else "grad_norm"] == ["nan", "nan"]
    assert f"not finite: the {fault} of" in verb(*command, "--trust-code", cwd=tmp_path).stdout
    beyond = verb(*command[:-1], step + 3, "--trust-code", cwd=tmp_path)
    said = f"no such step: it ends after step {step} (step {step}: loss"
    assert (beyond.returncode, said in beyond.stderr) == (1, True)


def test_what_cannot_be_repeated_is_refused(tmp_path, verb):
    config = write_tiny_config(tmp_path, EXTRA)
    train(config, tmp_path / "run", *SETS)
    done = verb("replay", tmp_path / "run", "--step", 6, "--nproc", 3)
    assert (done.returncode, "--nproc 3: the run's data are in 1 shard" in done.stderr) == (2, True)
    train(config, tmp_path / "sparse", "train.steps=8", "metrics.log_interval=8", "checkpoint.every=2")
    assert "nothing to compare: step 6 was not logged" in verb("replay", tmp_path / "sparse", "--step", 6).stdout
    digests = tmp_path / "run" / "digests.jsonl"
    digests.write_text(digests.read_text() + digests.read_text().replace('"global_step": 6', '"global_step": "6"'))
    assert '"global_step": "6"' in digests.read_text()
    assert not verb("bisect", tmp_path / "run", tmp_path / "run").returncode
    (tmp_path / "sparse" / "config.resolved.toml").write_text("[train]\nsteps = inf\n")
    done = verb("replay", tmp_path / "sparse", "--step", 6)
    assert (done.returncode, "train.steps" in done.stderr) == (2, True)
    done = verb("replay", tmp_path / "run", "--step", 9)
    assert (done.returncode, "has 8 steps, not 9" in done.stderr) == (2, True)
    file = next((tmp_path / "corpus" / "a").glob("*.jsonl"))
    file.write_text(file.read_text().replace("the", "The"))
    for words in (("replay", tmp_path / "run", "--step", 3), ("data", "at", tmp_path / "run", 6)):
        done = verb(*words)
        assert (done.returncode, "the data changed" in done.stderr) == (2, True)
        assert done.stderr.endswith("put the data back\n")


def test_a_resumed_run_is_repeated_with_the_settings_of_each_launch(config, tmp_path, verb):
    train(config, tmp_path / "trunk", *SETS, "train.steps=4")
    branch = ("--resume", tmp_path / "trunk" / "checkpoints" / "step_00000004")
    train(config, tmp_path / "run", *SETS, "optimizer.lr=0.002", "checkpoint.every=2", more=branch)
    train(config, tmp_path / "run", *SETS, "train.steps=10", "optimizer.lr=0.003", more=("--resume", "auto"))
    for step, origin in ((6, 4), (9, 8)):  # from the trunk's checkpoint, and from its own
        found = answer(verb, "replay", tmp_path / "run", "--step", step)
        assert (found["is_equal"], found["from_step"]) == (True, origin)
    # Later launches changed settings, and no checkpoint is left of the one that trained the step.
    for steps, *sets in ((4,), (8, "optimizer.lr=0.003", "data.source.second.weight=9"), (12, "optimizer.lr=0.004")):
        more = ("--resume", "auto") if sets else ()
        train(config, tmp_path / "pruned", *SETS, f"train.steps={steps}", "checkpoint.keep_last=1", *sets, more=more)
    found = answer(verb, "replay", tmp_path / "pruned", "--step", 3)
    assert (found["is_equal"], found["from_step"], found["note"]) == (True, 0, "")
    shutil.rmtree(tmp_path / "trunk")
    assert "began from a checkpoint of step 4 that is gone" in verb("replay", tmp_path / "run", "--step", 5).stderr


FLIP = """
import torch
from trainer.training.extension import Extension

class Flip(Extension):
    '''Changes one bit of a weight that every step reads, after step 4.'''

    def step_launched(self, step):
        if step == 4:
            next(p for p in reversed(list(self.run.model.parameters()))).data.view(-1).view(torch.int32)[0] ^= 4096
"""


def test_bisect_finds_the_step_at_which_runs_part_and_in_what(tmp_path, verb):
    config = write_tiny_config(tmp_path, EXTRA)
    (tmp_path / "flips.py").write_text(FLIP)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "corpus", other)
    changed = other / "a" / "stream2.jsonl"
    changed.write_text(changed.read_text().replace("that", "tHat"))
    text = config.read_text()
    (tmp_path / "data.toml").write_text(text.replace(str(tmp_path / "corpus"), str(other)))
    head, first, rest = text.split("[[data.source]]")
    second, model = rest.split("[model]")
    (tmp_path / "order.toml").write_text(f"{head}[[data.source]]{second}[[data.source]]{first}[model]{model}")
    runs = {
        "a": (config, ()),
        "same": (config, ("metrics.log_interval=2",)),
        "data": (tmp_path / "data.toml", ()),
        "order": (tmp_path / "order.toml", ()),
        "seed": (config, ("run.seed=8",)),
        "lr": (config, ("scheduler.warmup_steps=4",)),
        "flip": (config, ('extension=[{target="flips:Flip"}]', "metrics.log_interval=3")),
    }
    for name, (path, sets) in runs.items():
        train(path, tmp_path / name, *SETS, "metrics.log_interval=1", *sets, cwd=tmp_path)

    def bisect(name: str, *more: str) -> Any:
        runs = tmp_path / "a", tmp_path / name
        return answer(verb, "bisect", *runs, *more, cwd=tmp_path, code=0 if name == "same" else 3)

    same = bisect("same")
    assert (same["first_different_step"], same["data"], same["differs_in"]) == (None, "", ["config"])
    first = {name: bisect(name) for name in runs if name not in ("a", "same")}
    kinds = {name: each["differs_in"] for name, each in first.items()}
    assert all(each["is_exact"] and "config" in each["differs_in"] for each in first.values())
    assert first["seed"]["first_different_step"] == first["lr"]["first_different_step"] == 1
    assert kinds["lr"][:2] == ["config", "weights"]
    assert kinds["seed"][1:3] == ["initial_weights", "batch"]
    assert kinds["order"][1] == "batch"
    assert "\ninitial weights: they differ" in verb("bisect", tmp_path / "a", tmp_path / "seed", "--no-replay").stdout
    assert kinds["data"][:3] == ["config", "data", "batch"]
    assert "a/stream2.jsonl" in first["data"]["data"]
    assert first["flip"]["first_different_step"] == 5
    assert kinds["flip"][1] == "gradient"
    coarse = bisect("flip", "--no-replay")
    assert (coarse["last_equal_step"], coarse["first_different_step"], coarse["is_exact"]) == (3, 6, False)
    step = first["data"]["first_different_step"]
    reads = [answer(verb, "data", "at", tmp_path / name, step, "--text")["rows"] for name in ("a", "data")]
    assert reads[0] != reads[1]


def test_bisect_compares_what_runs_on_other_ranks_have_read(tmp_path):
    config = write_tiny_config(tmp_path)
    shards = ("distributed.shards=2", "train.steps=4", "metrics.digests=write", "metrics.log_interval=1")
    for name, ranks, more in (("a", 2, ()), ("b", 1, ()), ("seed", 1, ("run.seed=8",))):
        train(config, tmp_path / name, *shards, *more, nproc=ranks)
    same = launched("bisect", tmp_path / "a", tmp_path / "b", "--no-replay")
    assert "batches and learning rates are equal; sums are rounded otherwise: relative difference up to" in same.stdout
    assert "they read other data" not in same.stdout
    found = json.loads(launched("bisect", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert {*found["differs_in"]} <= {"config", "loss", "grad_norm"}
    assert 0 < found["relative_difference"] < 1e-4
    assert "they read other data" in launched("bisect", tmp_path / "a", tmp_path / "seed", "--no-replay").stdout


def test_losses_of_a_step_that_was_not_logged_are_not_said_to_agree():
    content = {"step": 5, "first_different": None, "compared_steps": []}
    for then, said in ((None, "step 5 was not logged, so losses do not compare"), (1.5, "difference up to 3.3e-01")):
        values = {"batch": ["ab", "ab"], "loss": [2.0, then]}
        assert said in _comparison({**content, "values": values})
