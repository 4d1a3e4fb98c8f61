"""Every mistake that is refused comes with the next thing to try."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator

from tests.support.runs import ROOT
from trainer.errors import UserError, UserErrors

# These say in the problem itself what has to be there.
TELLING = ("must be", "must give")


def refusals() -> Iterator[tuple[str, ast.Call]]:
    """Every `UserError(...)` of the package, with its place."""
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError":
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_refusal_names_a_fix_or_says_what_must_be_there():
    found = list(refusals())
    assert len(found) > 100
    silent = []
    for place, call in found:
        fixes = [*call.args[2:3], *(each for each in call.args if isinstance(each, ast.Starred))]
        fixes += [keyword.value for keyword in call.keywords if keyword.arg == "fix"]
        has_fix = any(not (isinstance(fix, ast.Constant) and not fix.value) for fix in fixes)
        if not has_fix and not any(word in ast.unparse(call) for word in TELLING):
            silent.append(place)
    assert not silent


def test_a_mistake_survives_the_way_between_processes():
    one, other = UserError("a", "is b", "do c", where="x.toml:3"), UserError("d", "is e", "do f")
    for error in (one, UserErrors([one, other])):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.where) == (type(error), str(error), error.where)
