"""`train doctor --node`: what a broken device or network does is reported, in time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.runs import run


@pytest.mark.distributed
def test_ranks_sum_over_all_of_them():
    ended = run("doctor", "--node", nproc=2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("all-reduce of 64 MB over 2 ranks: ") == 2


@pytest.mark.parametrize(("does", "said"), [("False", "cpu is wrong"), ("time.sleep(600)", "no answer within 2 s")])
def test_a_device_that_multiplies_wrongly_or_never_answers_is_reported(does, said):
    code = "import time; from trainer.tools import limits; from trainer.tools import doctor\n"
    code += "from trainer.tools.verbs import models\n"
    code += f"doctor.torch.equal = lambda *_: {does}\nlimits.NODE_SECONDS = 2.0\nmodels._check_node()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert said in ended.stdout + ended.stderr
    assert ended.returncode != 0
