"""scripts/slurm/check_node.py: what a broken device or network does is reported, in time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.runs import ROOT

SCRIPT = ROOT / "scripts/slurm/check_node.py"


def ended(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.distributed
def test_ranks_sum_over_all_of_them():
    found = ended("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("all-reduce of 64 MB over 2 ranks: ") == 2


@pytest.mark.parametrize(("does", "said"), [("False", "cpu is wrong"), ("time.sleep(600)", "no answer within 2 s")])
def test_a_device_that_multiplies_wrongly_or_never_answers_is_reported(does, said):
    code = f"import sys, time; sys.path.insert(0, {str(SCRIPT.parent)!r}); import check_node\n"
    code += f"check_node.torch.equal = lambda *_: {does}\ncheck_node.SECONDS = 2.0\ncheck_node.main()"
    found = ended("-c", code)
    assert said in found.stdout
    assert found.returncode == 3
