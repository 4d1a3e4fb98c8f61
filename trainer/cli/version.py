"""`train --version`."""

from __future__ import annotations

import typer


def print_version() -> None:
    """Print the program's and torch's version, without importing torch."""
    from importlib import metadata

    versions = []
    for name in ("trainer", "torch"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} (not installed)")
    typer.echo(", ".join(versions))
