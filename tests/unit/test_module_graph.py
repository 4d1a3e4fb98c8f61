"""The shape of the package: no import cycle, folders of a readable size, and exported names that resolve."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.runs import ROOT

PACKAGE = ROOT / "trainer"
MAX_MODULES = 25


def sources() -> dict[str, Path]:
    """Module name -> file; a package's name stands for its `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(name: str, path: Path) -> Iterator[str]:
    """Dotted names that a file imports when it runs: at the top and inside functions."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def import_graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Module -> the modules that it imports. `from package import module` counts as an import of the module alone, and
    `from package import name` as one of the package."""
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        graph[name] = set()
        for target in imported_names(name, path):
            module = target if target in files else target.rpartition(".")[0]
            if module in files and module != name:
                graph[name].add(module)
    return graph


def test_no_module_imports_itself_by_way_of_others() -> None:
    try:
        TopologicalSorter(import_graph(sources())).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(reversed(error.args[1])))


def test_imports_are_found_wherever_they_are_written(tmp_path: Path) -> None:
    package = tmp_path / "p"
    (package / "q").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "q" / "__init__.py").write_text("from .. import a\n")
    (package / "a.py").write_text("def f():\n    from p import b\n")
    (package / "b.py").write_text(
        "from typing import TYPE_CHECKING\nfrom .q.c import X\nif TYPE_CHECKING:\n    from p import a\n"
    )
    (package / "q" / "c.py").write_text("import p.b, os\nfrom p.q import missing\n")
    names = {"p": "__init__", "p.a": "a", "p.b": "b", "p.q": "q/__init__", "p.q.c": "q/c"}
    graph = import_graph({name: package / f"{file}.py" for name, file in names.items()})
    assert graph == {"p": set(), "p.a": {"p.b"}, "p.b": {"p.q.c"}, "p.q": {"p.a"}, "p.q.c": {"p.b", "p.q"}}
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def test_no_folder_is_a_corridor() -> None:
    counts = Counter(path.parent for path in sources().values() if path.stem != "__init__")
    crowded = {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MAX_MODULES}
    assert not crowded, f"folders with more than {MAX_MODULES} modules: {crowded}"


@pytest.mark.parametrize("name", [name for name, path in sources().items() if path.stem == "__init__"])
def test_every_exported_name_resolves(name: str) -> None:
    package = importlib.import_module(name)
    exported = getattr(package, "__all__", [])
    assert [each for each in exported if not hasattr(package, each)] == []
    assert len(set(exported)) == len(exported)
