"""The payload contract: the format of a row of metrics, and the only code to build or check it.

A payload is one line of strict JSON, `{"schema_version": 1, "mode": "train" | "eval",
"global_step": int, "metrics": {key: number}}`, plus optional sections that no consumer needs. JSON
has no NaN or infinity, so such a metric appears in the section `non_finite` as a word. The first
payload after a resume has the section `restart`, `{"from_step": int}`, and may repeat an earlier
step.

Only the standard library is used, so that a dashboard can import this module without torch.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, NoReturn

SCHEMA_VERSION: Final = 1
Mode = Literal["train", "eval"]
MODES: Final = ("train", "eval")
NON_FINITE_WORDS: Final = ("nan", "inf", "-inf")
RESTART: Final = "restart"
_REQUIRED: Final = ("schema_version", "mode", "global_step", "metrics")
# JSON has no limits: an integer beyond this one would overflow a reader's floats.
_LARGEST: Final = sys.float_info.max
# torchrun prefixes each line of a worker with its role and rank: "[default0]:".
_LAUNCHER_PREFIX: Final = re.compile(r"\A\[[^\[\]{}\"\s]+\]: ?")


class PayloadError(ValueError):
    """A violation of the contract: its location `key` (a dotted path, or `line`), and `reason`."""

    def __init__(self, key: str, reason: str) -> None:
        self.key, self.reason = key, reason
        super().__init__(f"{key}: {reason}")


@dataclass(frozen=True)
class Payload:
    """A valid payload: metrics, those that are `nan`, `inf` or `-inf`, and further sections."""

    mode: Mode
    global_step: int
    metrics: Mapping[str, float]
    non_finite: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)

    @property
    def restart(self) -> Restart | None:
        """The resume whose first payload it is, or None."""
        if RESTART not in self.sections:
            return None
        return Restart(self.sections[RESTART]["from_step"])

    def values(self) -> dict[str, float]:
        """All metrics as numbers, the non-finite ones included."""
        return all_values(vars(self))


class Restart(NamedTuple):
    """The run resumed from `global_step`. Rows may repeat later steps: the last one counts."""

    global_step: int
    details: Mapping[str, Any] = MappingProxyType({})


class Violation(NamedTuple):
    """One line that violates the contract (`line` counts from 1)."""

    line: int
    key: str
    reason: str


def all_values(payload: Mapping[str, Any]) -> dict[str, float]:
    """All metrics of a valid payload as numbers, the non-finite ones included."""
    non_finite = {key: float(word) for key, word in payload.get("non_finite", {}).items()}
    return {**payload["metrics"], **non_finite}


def build_payload(
    mode: Mode,
    global_step: int,
    metrics: Mapping[str, float],
    *,
    restart: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A payload of these metrics; NaN and infinities move to `non_finite`.

    Raises:
        PayloadError: a mode, step or value is invalid, or there are no metrics at all.
    """
    finite: dict[str, float] = {}
    words: dict[str, str] = {}
    value: Any
    for key, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise PayloadError(f"metrics.{key}", f"must be a number, got {value!r}")
        # Numbers of other libraries, such as numpy, are converted.
        number = int(value) if isinstance(value, Integral) else float(value)
        if isinstance(number, int) or math.isfinite(number):
            finite[key] = number
        else:
            words[key] = str(number)
    about = {"schema_version": SCHEMA_VERSION, "mode": mode, "global_step": global_step}
    payload: dict[str, Any] = {**about, "metrics": finite}
    if words:
        payload["non_finite"] = words
    if restart is not None:
        payload[RESTART] = dict(restart)
    validate_payload(payload)
    return payload


def encode_payload(payload: Mapping[str, Any]) -> str:
    """A payload as one line of strict JSON, without the newline.

    Raises:
        PayloadError: a section has a value that JSON cannot represent (NaN, an object).
    """
    try:
        return json.dumps(payload, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise PayloadError("line", f"not representable in JSON: {error}") from None


def parse_payload(line: str | bytes) -> Payload:
    """Parse one line that must be a payload.

    Raises:
        PayloadError: the line violates the contract.
    """
    obj = _decode(line)
    validate_payload(obj)
    sections = {name: obj[name] for name in obj if name not in (*_REQUIRED, "non_finite")}
    return Payload(obj["mode"], obj["global_step"], obj["metrics"], obj.get("non_finite", {}), sections)


def _text(line: str | bytes) -> str:
    if isinstance(line, str):
        return line
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PayloadError("line", f"not UTF-8 at byte {error.start}") from None


def _decode(line: str | bytes) -> Any:
    try:
        return json.loads(_text(line), parse_constant=_reject_constant, object_pairs_hook=_reject_duplicates)
    except PayloadError:
        raise
    except RecursionError:
        raise PayloadError("line", "nested too deeply") from None
    except ValueError as error:
        raise PayloadError("line", f"not one JSON object: {error}") from None


# Python's json takes NaN, and the last of equal keys, without a word.
def _reject_constant(token: str) -> NoReturn:
    raise PayloadError("line", f"{token} is not JSON; non-finite metrics belong in `non_finite`")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise PayloadError(twice, "appears twice in one object")
    return found


def validate_payload(obj: Any) -> None:
    """Check a decoded payload.

    It must have at least one metric, finite or not. Unknown sections are accepted.

    Raises:
        PayloadError: the first violation found, with its key.
    """
    if not isinstance(obj, Mapping):
        raise PayloadError("line", f"must be an object, got {type(obj).__name__}")
    _check_version(obj.get("schema_version"))
    for name in _REQUIRED:
        if name not in obj:
            raise PayloadError(name, "missing")
    if obj["mode"] not in MODES:
        raise PayloadError("mode", f"must be one of {', '.join(MODES)}, got {obj['mode']!r:.80}")
    _check_step(obj["global_step"])
    metrics, words = _section(obj, "metrics"), _section(obj, "non_finite")
    for key, value in metrics.items():
        if type(value) not in (int, float) or not -_LARGEST <= value <= _LARGEST:
            raise PayloadError(f"metrics.{key}", f"must be a finite number, got {value!r:.80}")
    for key, value in words.items():
        if value not in NON_FINITE_WORDS:
            wanted = ", ".join(NON_FINITE_WORDS)
            raise PayloadError(f"non_finite.{key}", f"must be one of {wanted}, got {value!r:.80}")
    if RESTART in obj:
        _check_step(_section(obj, RESTART).get("from_step"), f"{RESTART}.from_step")
    if both := metrics.keys() & words.keys():
        raise PayloadError(f"non_finite.{min(both)}", "appears in metrics as well")
    if not metrics and not words:
        raise PayloadError("metrics", "must not be empty")


def _section(obj: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section, which may be missing; its keys are checked."""
    section = obj.get(name, {})
    if not isinstance(section, Mapping):
        raise PayloadError(name, f"must be an object, got {type(section).__name__}")
    for key in section:
        if not isinstance(key, str) or not key:
            raise PayloadError(name, f"keys must be non-empty strings, got {key!r}")
    return section


def _check_version(version: Any) -> None:
    if type(version) is not int or version != SCHEMA_VERSION:  # True is 1
        raise PayloadError("schema_version", f"must be {SCHEMA_VERSION}, got {version!r:.80}")


def _check_step(step: Any, key: str = "global_step") -> None:
    if type(step) is not int or step < 0:  # bool is a subclass of int
        raise PayloadError(key, f"must be an integer of at least 0, got {step!r:.80}")


def strip_launcher_prefix(line: str) -> str:
    """The line without torchrun's `[default0]:` prefix."""
    return _LAUNCHER_PREFIX.sub("", line, count=1)


def validate_stream(lines: Iterable[str | bytes]) -> Iterator[Violation]:
    """Check a stream of lines, see `parse_payload`; yields every violation in order.

    Launcher prefixes are tolerated. `global_step` may repeat (evaluation follows training in one
    step) but must not decrease, except to a restart's.
    """
    last_step = 0
    for number, raw in enumerate(lines, start=1):
        try:
            found = parse_payload(strip_launcher_prefix(_text(raw).rstrip("\r\n")))
        except PayloadError as error:
            yield Violation(number, error.key, error.reason)
            continue
        if found.restart is not None:
            last_step = found.restart.global_step
        if found.global_step < last_step:
            problem = f"falls from {last_step} to {found.global_step}, and no restart is from there"
            yield Violation(number, "global_step", problem)
        last_step = found.global_step
