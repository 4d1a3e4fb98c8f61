"""What `train check` says of a model of one's own that does not keep the contract: one line, with the place to look at."""

from __future__ import annotations

import io
import json
import sys
import textwrap

import pytest

from tests.support.in_process import program, train_here
from tests.support.runs import FULL_ROWS, overrides, read_rows, train, write_tiny_config
from trainer.cli.parts import PARTS
from trainer.config.schema import ModelTable
from trainer.errors import UserError
from trainer.lab.contract_check import find_size
from trainer.training.plan import build_model

HEAD = """\
import torch
from torch import nn
from trainer.model.protocol import ModelOutput

class Model(nn.Module):
    def __init__(self, vocab_size, dim, state_width):
        super().__init__()
        self.state_width, self.dim = state_width, dim
        self.embedding = nn.Embedding(vocab_size, dim)
        self.head = nn.Linear(dim, vocab_size)
"""
BUILD = """
def build(vocab_size, dim, num_layers):
    return Model(vocab_size, dim, WIDTH)
"""


@pytest.fixture
def verb(tmp_path, capsys, monkeypatch):
    """Runs a verb where the module `broken_model` has this text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(text: str, *arguments: object):
        (tmp_path / "broken_model.py").write_text(text)
        monkeypatch.delitem(sys.modules, "broken_model", raising=False)
        ended = program(arguments, capsys)
        sys.modules.pop("broken_model", None)
        return ended

    return run


@pytest.fixture
def check(tmp_path, verb):
    """What `train check` says of a config that names its `build`."""

    def run(text: str, *sets: str, options: tuple[str, ...] = ()):
        settings = overrides("model.target=broken_model:build", *sets)
        return verb(text, "check", "--config", write_tiny_config(tmp_path), *settings, *options)

    return run


def model(forward: str, *, width: str = "dim") -> str:
    return HEAD + textwrap.indent(textwrap.dedent(forward), "    ") + BUILD.replace("WIDTH", width)


GOOD = """
def forward(self, tokens, state=None):
    embedded = self.embedding(tokens)
    hidden = embedded.cumsum(1) + (0 if state is None else state[:, None])
    return ModelOutput(self.head(hidden), hidden[:, -1])
"""


def test_a_model_for_cuda_alone_is_not_tried(check):
    ended = check(model("def forward(self): ..."), "train.device=cuda")
    assert ended.returncode == 0, ended.stderr
    assert "#   contract = not tried: the run is for CUDA" in ended.stdout


FORWARD = "model.target: broken_model:build: its forward "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            model("def forward(self, tokens, state):\n    return state.view(1, self.dim), tokens", width="dim + 1"),
            f"{FORWARD}fails with tokens [1, 16] and state [1, 17]: RuntimeError: shape '[1, 16]' is invalid for input "
            "of size 17 (broken_model.py:12)",
        ),
        (
            model("def forward(self, tokens, state):\n    return self.head(self.embedding(tokens))"),
            f"{FORWARD}returns a Tensor without .logits and .state (broken_model.py:11)",
        ),
        ("import no_such_pkg\n", "No module named 'no_such_pkg' (broken_model.py:1); install no_such_pkg"),
        (
            "def build(vocab_size, dim, num_layers):\n    return len(dim)\n",
            "model.target: broken_model:build fails: TypeError: object of type 'int' has no len() (broken_model.py:2)",
        ),
        (
            "def build(vocab_size, dim):\n    return None\n",
            "model.args: cannot call broken_model:build with vocab_size, dim, num_layers: got an unexpected keyword",
        ),
    ],
)
def test_a_model_that_breaks_the_contract_or_fails_is_refused_in_one_line_with_its_place(check, text, message):
    said = check(text).mistake
    assert message in said
    hint = "make it forward(tokens [B, T], state [B, state_width]) -> ModelOutput("
    assert (hint in said) == message.startswith(FORWARD)


DROPS = model("""
def __init__(self, vocab_size, dim, state_width):
    super().__init__()
    self.state_width = dim
    self.embedding = nn.Embedding(vocab_size, dim)
    self.gru = nn.GRU(dim, dim, batch_first=True)
    self.head = nn.Linear(dim, vocab_size)

def forward(self, tokens, state=None):
    hidden, last = self.gru(self.embedding(tokens))
    return ModelOutput(self.head(hidden), last[0])
""")
PEEKS = model(GOOD).replace("self.head(hidden)", "self.head(hidden + hidden.roll(-1, 1))")


def test_a_model_that_drops_its_state_is_refused_in_one_clear_sentence(check):
    said, place = check(DROPS).mistake, "--set model.target=broken_model:build: model.target: broken_model:build: "
    assert said.startswith(f"{place}breaks carry: cells of 6 tokens differ from the uncut row from position 6 on, by ")
    assert "or set model.contract = false to train it all the same" in said
    assert check(PEEKS).stderr.startswith(f"{place}breaks causality: ")


def test_all_rows_of_the_configs_batch_are_judged_and_that_is_said(check):
    late = model(GOOD.replace("state[:, None]", "(state * (torch.arange(len(state)) < 12)[:, None])[:, None]"))
    assert "breaks soak: row 12 of 16, " in check(late, "ledger.capacity=64", "data.mixing.batch_size=16").stderr
    assert "soak of 12 rows, 6 cells" in check(late, "ledger.capacity=64", "data.mixing.batch_size=12").stdout


ALIGN = 'data.align="stream"'


def test_rows_of_several_documents_are_refused_for_a_model_without_resets(check):
    assert check(model(GOOD), ALIGN, FULL_ROWS).mistake.startswith(
        f"--set {ALIGN}: data.align: documents share a row, and broken_model:build takes no resets, which keep them "
    )


def test_resets_are_judged_where_rows_hold_some_and_only_there(check):
    takes = [model(GOOD).replace("state=None)", f"state=None, {more})") for more in ("**inputs", "resets=None")]
    for text in takes:  # and ignores them
        assert ": breaks resets: " in check(text, ALIGN, FULL_ROWS).stderr
    assert "contract = held: forward, purity, soak" in check(takes[1]).stdout


def test_the_contract_can_be_left_out_and_that_is_said(check):
    assert "#   contract = not tried: --no-contract" in check(DROPS, options=("--no-contract",)).stdout


def train_broken(tmp_path, *sets: str, **options) -> str:
    (tmp_path / "broken_model.py").write_text(DROPS)
    own, env = ("model.target=broken_model:build", *sets), {"PYTHONPATH": str(tmp_path)}
    return train(write_tiny_config(tmp_path), tmp_path / "run", *own, extra=env, **options)


@pytest.mark.distributed
def test_a_run_that_breaks_carry_is_refused_once_on_two_ranks(tmp_path):
    assert train_broken(tmp_path, nproc=2, code=2).count("breaks carry") == 1


def test_an_unchecked_model_is_recorded_and_judged_when_a_resume_asks_for_it(tmp_path):
    train_broken(tmp_path, "checkpoint.every=3", "model.contract=false")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["not_tried"] for event in events if event["event"] == "contract"] == ["model.contract is false"]
    assert "breaks carry" in train_broken(tmp_path, more=("--steps", 10, "--resume", "auto"), code=2)


BUFFER = "self.register_buffer('scale', torch.randn(dim), persistent=False)"
UNSAVED = model(GOOD.replace("embedding(tokens)", "embedding(tokens) * self.scale"))
UNSAVED = UNSAVED.replace("self.state_width, self.dim = state_width, dim", f"self.state_width = dim; {BUFFER}")


def test_what_no_state_dict_holds_is_refused_and_drawn_again_by_the_verbs(tmp_path, check, verb):
    refused, judged = check(UNSAVED), verb(UNSAVED, "doctor", "--model", "broken_model:build")
    assert (refused.returncode, judged.returncode) == (2, 3)
    for said in (refused.stderr, judged.stdout):
        assert "breaks purity" in said
        assert "something that the state_dict does not hold (a buffer with persistent=False?)" in said
    own = ("model.target=broken_model:build", "model.contract=false", "run.seed=5", "eval.holdout_fraction=0.3")
    own += ("eval.every=6", "eval.batches=1000", "checkpoint.every=6", "data.max_group_cells=64", "metrics.stdout=off")
    train_here(write_tiny_config(tmp_path), tmp_path / "run", *own)
    sys.modules.pop("broken_model")
    logged = read_rows(tmp_path / "run" / "metrics.jsonl")["eval", 6]["eval_loss"]
    ended = verb(UNSAVED, "eval", tmp_path / "run", "--held-out", "--trust-code", "--json")
    assert json.loads(ended.stdout)["metrics"]["eval_loss"] == pytest.approx(logged, rel=1e-6)


def test_the_doctor_prints_a_table_and_exits_with_3_on_a_breach(verb):
    ended = verb(f"{DROPS}sized = lambda **sizes: build(**sizes)\n", "doctor", "--model", "broken_model:sized")
    assert ended.returncode == 3, ended.stderr
    assert "carry" in ended.stdout
    assert "broken_model:sized breaks carry" in ended.stdout
    family = ("gated_delta", "--args", "{ heads = 2 }", "--dim", "32")
    ended = verb(DROPS, "doctor", "--model", *family, "--json")
    assert ended.returncode == 0, ended.stdout
    verdicts = {verdict["check"]: verdict["status"] for verdict in json.loads(ended.stdout)["verdicts"]}
    assert verdicts["carry"] == verdicts["gradient"] == "held"
    for arguments in (("broken_model:build", "--args", "[1]"), ("mamba",)):
        assert verb(DROPS, "doctor", "--model", *arguments).mistake


def test_the_doctor_takes_a_model_of_transformers_on_disk(verb, tmp_path):
    transformers = pytest.importorskip("transformers", reason="extra hf")
    small = transformers.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=8, time_step_rank=4)
    transformers.MambaForCausalLM(small).save_pretrained(tmp_path / "mamba")
    ended = verb("", "doctor", "--hf", tmp_path / "mamba")
    assert ended.returncode == 3, ended.stderr
    assert "(MambaForCausalLM) breaks carry" in ended.stdout
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    ended = verb("", "doctor", "--hf", tmp_path / "llama", "--json")
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert "one of attention, whose cache grows with every token" in json.loads(ended.stdout)["verdicts"][0]["text"]
    whole = ("--hf", tmp_path / "llama")
    for arguments in (
        ("--hf", "nowhere"),
        ("--hf", tmp_path),
        (*whole, "--model", "gru"),
        (*whole, "--args", "{a=1}"),
        (),
    ):
        assert verb("", "doctor", *arguments).mistake


def test_code_in_a_directory_of_save_pretrained_runs_if_it_is_trusted_alone(verb, tmp_path, monkeypatch):
    """`transformers` would ask, and take the answer from stdin."""
    pytest.importorskip("transformers", reason="extra hf")
    maps = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": maps}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ValueError('it ran')\n")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    ended = verb("", "doctor", "--hf", tmp_path)
    assert "it needs the code in it; train doctor runs that with --trust-code" in ended.mistake
    assert ended.stdout == ""
    with pytest.raises(UserError, match="it needs the code in it"):
        build_model(ModelTable(family="mamba2", args={"from": str(tmp_path)}), 40, parts=PARTS)
    assert not (tmp_path / "ran").exists()
    assert "it ran" in verb("", "doctor", "--hf", tmp_path, "--trust-code").mistake
    assert (tmp_path / "ran").exists()


def test_a_size_to_check_is_the_real_one_a_smaller_one_or_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = "import torch\ndef build(vocab_size, dim, num_layers, *, n):\n    model = torch.nn.Linear(n, 1000)\n"
    (tmp_path / "fixed_size.py").write_text(text + "    model.state_width = 0\n    return model\n")

    def size(n: int, seq_len: int = 16):
        return find_size(ModelTable(target="fixed_size:build", args={"n": n}), 50, seq_len, PARTS)

    for dim, layers, checked in ((256, 4, (256, 4)), (16, 64, (16, 2)), (4096, 32, (256, 2))):
        assert find_size(ModelTable(dim=dim, num_layers=layers), 257, 128, PARTS)[:2] == checked
    assert size(1000).parameters == 1_001_000
    assert size(100_000).parameters == 100_001_000  # it has no smaller size: checked once
    assert "would take long" in size(1_000_000)
    assert "would take long" in size(1000, seq_len=10_000_000)
