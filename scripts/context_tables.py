"""The tables and the figure of docs/context.md, from the runs of scripts/context.py."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from experiments import markdown, mean_of
from numpy.typing import NDArray
from recall_gaps import GAPS

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIGURE = ROOT / "docs" / "context.md", ROOT / "docs" / "images" / "context.svg"
BEGIN, END = "<!-- begin of what make context wrote -->\n", "<!-- end of what make context wrote -->"
LONGER = 4  # times as many steps
TITLES = {"text": "text", "longer": f"text, {LONGER} times as many steps"}
T_975 = (math.nan, 12.71, 4.303, 3.182, 2.776)  # Student's, by degrees of freedom
SHARES = np.linspace(-1.0, 3.0, 401)
GRAY = "#7a8794"
COLORS = ("#0072b2", "#d55e00", "#00866a", "#cc79a7", "#e69f00", "#56b4e9", GRAY)
Floats = NDArray[np.float64]
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows
Found = Sequence[dict[str, Any]]  # what the runs of a kind gave, by seed


class Kind(NamedTuple):
    """Runs that differ in their seed and learning rate alone."""

    task: str  # text, recall; longer: on text, of more steps; speed: some steps on text, without an evaluation
    family: str
    window: int
    spread: int  # 0: single rows in shuffled order, each from a zero state

    @property
    def rows(self) -> str:
        """In words."""
        arranged = "carried" + ", spread 1" * (self.spread == 1) if self.spread else "shuffled"
        return f"{self.window:,}, {arranged}"

    def run_name(self, lr: float, *, is_trial: bool = False) -> str:
        """Of the runs at a learning rate."""
        return " ".join(map(str, (*self, lr))) + " trial" * is_trial


def of_seeds(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval) over seeds, by Student's t."""
    mean, error = mean_of(values)
    return mean, T_975[len(values) - 1] * error


def interval(nats: Floats, tokens: Floats) -> tuple[float, float]:
    """(value, half of its 95 % interval) of sum(nats) / sum(tokens), for nats [seeds, documents] and tokens [documents].
    Added as independent: Student's over seeds, and over documents the error of a ratio of sums, of the mean over seeds."""
    value, half = of_seeds((nats.sum(1) / tokens.sum()).tolist())
    mean, count = nats.mean(0), len(tokens)
    residuals = mean - mean.sum() / tokens.sum() * tokens
    return value, math.hypot(half, 1.96 * math.sqrt(count / (count - 1) * (residuals**2).sum()) / tokens.sum())


def documents(found: Found) -> tuple[Floats, Floats]:
    """Nats [seeds, documents] and tokens [documents] of the held-out text."""
    rows = np.array([run["documents"] for run in found], dtype=np.float64)
    return rows[:, :, 1], rows[0, :, 0]


def recovered(shuffled: Found, carried: Found, long: Found) -> str:
    """The share of a long window's gain that carrying recovers, and the shares that are not excluded at 95 %: those for which
    (shuffled - carried) - share (shuffled - long) may be zero (Fieller's interval)."""
    (base, tokens), own, best = documents(shuffled), documents(carried)[0], documents(long)[0]
    gain, half = interval(base - best, tokens)
    if gain < half:
        return "undefined: that gain is not above 0"
    around = [(share, *interval(base - own - share * (base - best), tokens)) for share in SHARES]
    kept = [share for share, value, half in around if abs(value) <= half]
    return f"{(base - own).sum() / (base - best).sum():.0%} ({kept[0]:.0%} to {kept[-1]:.0%})"


def after_resets(run: Mapping[str, Any], window: int) -> float:
    """The held-out loss with states reset at each row: behind a document's first row the gain of carrying is lost."""
    behind = sum(max(tokens - window, 0) for tokens, _ in run["documents"])
    gain = float(run.get("eval/depth/beyond_cell/carry_gain", 0.0))
    return float(run["eval_loss"] + gain * behind / sum(tokens for tokens, _ in run["documents"]))


def said(found: tuple[float, float], form: str = ".3f") -> str:
    return f"{found[0]:{form}}±{found[1]:{form}}"


def text_table(found: Mapping[Kind, Found], lrs: Mapping[Kind, str], kinds: Sequence[Kind]) -> Table:
    """What a window costs on text, and the share of the longest one's gain that carrying recovers."""
    base, tokens = documents(found[kinds[0]])
    rows = []
    for kind in kinds:
        nats, own_tokens = documents(found[kind])
        if own_tokens.tolist() != tokens.tolist():
            raise SystemExit(f"{kinds[0]} and {kind} were run on other corpora: take one's runs out of --out")
        reset = of_seeds([after_resets(run, kind.window) for run in found[kind]])
        gained = "" if kind == kinds[0] else said(interval(base - nats, tokens))
        beside = found[kind._replace(task="speed")][0]
        kept = f"{beside['kept_mb']:.1f}" if "kept_mb" in beside else "unknown"
        speed = f"{beside['tokens_per_sec']:,}"
        rows.append((kind.rows, lrs[kind], said(interval(nats, tokens)), gained, said(reset), speed, kept))
    carried = next(kind for kind in kinds if kind.spread > 1)
    long = max(kinds, key=lambda kind: (kind.window, -kind.spread))
    share = recovered(*(found[kind] for kind in (kinds[0], carried, long)))
    title = f"{carried.family}, {TITLES[carried.task]}; "
    title += f"share of the gain of ({long.rows}) that ({carried.rows}) recovers: {share}"
    columns = ("rows", "learning rate", "loss", "gain", "reset", "tokens/s", "MB a row")
    return title, columns, rows


def recall_table(found: Mapping[Kind, Found], _: Mapping[Kind, str], kinds: Sequence[Kind]) -> Table:
    """Answers right, by the tokens since they were shown."""
    rows = []
    for kind in kinds:
        right = (said(of_seeds([run[f"eval/{gap}/accuracy"] for run in found[kind]]), ".2f") for gap in GAPS)
        rows.append((kind.rows, *right))
    gaps = (f"{low:,} to {high:,}" for low, high in GAPS.values())
    return f"{kinds[0].family}, answers right after so many tokens", ("rows", *gaps), rows


def tables(found: Mapping[Kind, Found], lrs: Mapping[Kind, str]) -> Iterator[Table]:
    """Two of each family, and of one those of longer runs."""
    for family in dict.fromkeys(kind.family for kind in found):
        for task, table in (("text", text_table), ("longer", text_table), ("recall", recall_table)):
            kinds = [kind for kind in found if kind[:2] == (task, family)]
            if kinds:
                yield table(found, lrs, kinds)


def draw(found: Mapping[Kind, Found]) -> None:
    """For each family: the gain on text by depth, and the right answers by gap."""
    import matplotlib as mpl
    from matplotlib import pyplot

    families = list(dict.fromkeys(kind.family for kind in found))
    gray: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GRAY
    )
    with mpl.rc_context({**gray, "svg.hashsalt": "context", "font.size": 9}):
        figure, panels = pyplot.subplots(
            len(families), 2, figsize=(8, 3.4 * len(families)), squeeze=False, layout="constrained"
        )
        for family, (left, right) in zip(families, panels, strict=True):
            left.set(xscale="log", xlabel="tokens of the document before", ylabel=f"{family}: gain on text, nats")
            right.set(xscale="log", xlabel="tokens since what is asked for", ylabel="answers right", ylim=(0, 1.05))
            for color, kind in zip(COLORS, [kind for kind in found if kind[:2] == ("text", family)], strict=False):
                base = found[next(each for each in found if each[:2] == kind[:2])]
                at = sorted(int(key.split("/")[2]) for key in base[0] if re.fullmatch(r"eval/depth/[1-9]\d*/loss", key))
                pairs = list(zip(base, found[kind], strict=True))
                gains = [
                    of_seeds([b[f"eval/depth/{n}/loss"] - own[f"eval/depth/{n}/loss"] for b, own in pairs]) for n in at
                ]
                recall = found[kind._replace(task="recall")]
                rights = [of_seeds([run[f"eval/{gap}/accuracy"] for run in recall]) for gap in GAPS]
                middles = [math.sqrt(low * high) for low, high in GAPS.values()]
                for panel, x, y in ((left, at, gains), (right, middles, rights)):
                    values, halves = zip(*y, strict=True)
                    panel.errorbar(
                        x, values, halves, color=color, label=kind.rows, linewidth=1.5, elinewidth=0.7, marker="."
                    )
            right.axhline(1 / 8, color=GRAY, linewidth=0.7, linestyle=":")
        panels[0][1].legend(frameon=False, fontsize=8)
        figure.savefig(FIGURE, transparent=True, metadata={"Date": None})


def write_page(shown: Iterable[Table], found: Mapping[Kind, Found]) -> None:
    """Replace the tables of the page, and draw its figure."""
    parts = [f"**{title}**\n\n{markdown(columns, rows)}\n\n" for title, columns, rows in shown]
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(before + BEGIN + "".join(parts) + END + after, encoding="utf-8")
    draw(found)
