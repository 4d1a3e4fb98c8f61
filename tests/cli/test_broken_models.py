"""What `train check` says of a model of one's own that does not keep the contract: one line, with the place to look at."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.support.in_process import program
from tests.support.runs import run, write_tiny_config

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
def check(tmp_path, capsys, monkeypatch):
    """Writes a module, and gives what `train check` says of a config that names its `build`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(text: str, *overrides: str):
        (tmp_path / "broken_model.py").write_text(text)
        monkeypatch.delitem(sys.modules, "broken_model", raising=False)
        options = [part for text in ("model.target=broken_model:build", *overrides) for part in ("--set", text)]
        ended = program(["check", "--config", write_tiny_config(tmp_path), *options], capsys)
        sys.modules.pop("broken_model", None)
        return ended

    return run


def model(forward: str, *, width: str = "dim") -> str:
    return HEAD + textwrap.indent(textwrap.dedent(forward), "    ") + BUILD.replace("WIDTH", width)


GOOD = """
def forward(self, tokens, state=None):
    hidden = self.embedding(tokens) + (0 if state is None else state[:, None])
    return ModelOutput(self.head(hidden), hidden[:, -1])
"""


def test_a_model_that_keeps_the_contract_is_valid(check):
    ended = check(model(GOOD))
    assert ended.returncode == 0, ended.stderr
    assert "#   forward_pass = ran" in ended.stdout


def test_a_model_for_cuda_alone_is_not_tried(check):
    ended = check(model("def forward(self): ..."), "train.device=cuda")
    assert ended.returncode == 0, ended.stderr
    assert "#   forward_pass = not tried: the run is for CUDA" in ended.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            model("def forward(self, tokens, state):\n    return state.view(1, self.dim), tokens", width="dim + 1"),
            "its forward fails with tokens [1, 16] and state [1, 17]: RuntimeError: shape '[1, 16]' is invalid for input "
            "of size 17 (broken_model.py:12)",
        ),
        (
            model("def forward(self, tokens):\n    return self.head(self.embedding(tokens))"),
            "TypeError: Model.forward() got an unexpected keyword argument 'state' (broken_model.py:11)",
        ),
        (
            model("def forward(self, tokens, state):\n    return self.head(self.embedding(tokens))"),
            "its forward returns a Tensor without .logits and .state (broken_model.py:11)",
        ),
        (
            model("def forward(self, tokens, state):\n    return ModelOutput(self.embedding(tokens), state)"),
            "its forward returns logits [1, 16, 16] for tokens [1, 16], not [1, 16, 257]",
        ),
        (
            model("def forward(self, tokens, state):\n    return ModelOutput(self.head(self.embedding(tokens)), None)"),
            "its forward returns a state NoneType for one row, not [1, 16], its state_width",
        ),
    ],
)
def test_a_forward_that_breaks_the_contract_is_refused_with_its_place(check, text, message):
    ended = check(text)
    assert ended.returncode == 2, ended.stderr
    assert "model.target: broken_model:build: its forward" in ended.stderr
    assert message in ended.stderr
    assert "make it forward(tokens [B, T], state [B, state_width]) -> ModelOutput(" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "x = 1\ny = nowhere\n",
            "broken_model fails on import: NameError: name 'nowhere' is not defined (bro",
        ),
        (
            "x = 1\ndef build(:\n",
            "broken_model fails on import: SyntaxError: invalid syntax (broken_model.py:2",
        ),
        (
            "import no_such_pkg\n",
            "broken_model was found, but imports no_such_pkg, which was not (broken_model.py:1); install",
        ),
        (
            "def build(vocab_size, dim, num_layers):\n    return len(dim)\n",
            "model.target: broken_model:build fails: TypeError: object of type 'int' has no len() (broken_model.py:2)",
        ),
        (
            "def build(vocab_size, dim):\n    return None\n",
            "model.args: cannot call broken_model:build with vocab_size, dim, num_layers and the keys of args: got an "
            "unexpected keyword argument 'num_layers'",
        ),
    ],
)
def test_a_module_that_fails_is_told_in_one_line_with_its_place(check, text, message):
    ended = check(text)
    assert ended.returncode == 2, ended.stderr
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_model_that_looks_at_its_numbers_while_it_is_built_can_be_checked(check):
    text = model(GOOD).replace("    return Model(", "    assert torch.zeros(1).item() == 0\n    return Model(")
    assert check(text).returncode == 0


def test_the_check_leaves_the_generator_as_it_was(check):
    import torch

    torch.manual_seed(5)
    before = torch.get_rng_state()
    check(model(GOOD))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_fails_in_its_first_step_says_that_the_model_breaks_the_contract(tmp_path):
    (tmp_path / "broken_model.py").write_text(model("def forward(self, tokens):\n    return tokens"))
    line = ["--config", write_tiny_config(tmp_path), "--run-dir", tmp_path / "run"]
    result = run(*line, "--set", "model.target=broken_model:build", extra={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    assert "model.target: broken_model:build: its forward fails with" in result.stderr
    assert "broken_model.py:11); make it forward(tokens" in result.stderr
