"""Builds the documentation site (`make site`): the written pages, and the API reference from the docstrings.

Pages link to each other and to sources by repository path. So the site is built from a mirror of the repository below
build/, with the reference added; mkdocs checks every link, and any warning fails the build.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
SOURCE = BUILD / "site_source"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
FOLDERS = ("docs", "examples", "train_configs", "trainer", "scripts", "deploy", "tests/support")
PACKAGES = sorted(path.stem for path in (ROOT / "trainer").glob("[!_]*") if path.suffix in ("", ".py"))


def has_public_names(module: Path) -> bool:
    """Whether a module has a public class or function to document."""
    nodes = ast.parse(module.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_") for node in nodes)


def modules_of(package: str) -> list[str]:
    """The modules of a package with public names, sorted."""
    path = ROOT / "trainer" / package.replace(".", "/")
    if path.with_suffix(".py").exists():
        return [f"trainer.{package}"]
    files = sorted(path.rglob("[!_]*.py"))
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if has_public_names(file)]


def page_of(package: str) -> str:
    """The reference page of a package, to be filled by mkdocstrings."""
    return "\n".join([f"# trainer.{package}\n", *(f"::: {module}\n" for module in modules_of(package))])


def mirror(folder: Path, *paths: str) -> None:
    """Copy the files that git tracks, or does not ignore; with `paths`, only those below them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def main() -> int:
    """Mirror, add the reference, build; returns mkdocs's exit code."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    mirror(SOURCE, *PAGES, *FOLDERS)
    (SOURCE / "api").mkdir()
    for package in PACKAGES:
        (SOURCE / "api" / f"{package}.md").write_text(page_of(package), encoding="utf-8")
    reference = [{f"trainer.{package}": f"api/{package}.md"} for package in PACKAGES]
    config: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    for entry in config["nav"]:
        if "API" in entry:
            entry["API"] = reference
    config |= {"docs_dir": str(SOURCE), "site_dir": str(BUILD / "site")}
    handler = config["plugins"][1]["mkdocstrings"]["handlers"]["python"]
    handler["paths"] = [str(ROOT)]
    handler["options"]["extensions"] = [str(ROOT / "scripts" / "site_docstrings.py")]
    written = BUILD / "mkdocs.yml"
    written.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(written)]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code == 0:
        print(f"the site is in {(BUILD / 'site').relative_to(ROOT)}; open build/site/index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
