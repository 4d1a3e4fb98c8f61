"""Pictures that are written to a file, PNG or SVG (extra `preview`: matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import UserError
from trainer.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")


def check_picture(out: str, *, example: str) -> None:
    """Refuse a picture that cannot be drawn, before anything is computed.

    Args:
        out: what `--out` says.
        example: a name that would do.

    Raises:
        UserError: unknown suffix, missing directory, or matplotlib is not installed.
    """
    path = Path(out)
    if path.suffix.lower() not in SUFFIXES:
        raise UserError("--out", f"must end in {' or '.join(SUFFIXES)}, got {out!r}", f"write --out {example}")
    if not path.parent.is_dir():
        raise UserError("--out", f"the directory {path.parent} does not exist", "create it first")
    if not can_draw():
        problem = "needs the package matplotlib, which is not installed"
        raise UserError("--out", problem, "run: pip install matplotlib")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401 - only whether it is installed
    except ImportError:
        return False
    return True


def save_picture(figure: Figure, out: Path) -> None:
    """Write a figure, the same bytes for the same figure.

    Raises:
        UserError: the file cannot be written.
    """
    kind = out.suffix.removeprefix(".").lower()
    try:
        with replacing(out, follow=True) as file:
            figure.savefig(file, format=kind, dpi=90, metadata={"Date": None} if kind == "svg" else None)
    except OSError as error:
        raise UserError("--out", f"{out} cannot be written: {error.strerror}", "check the path") from None
