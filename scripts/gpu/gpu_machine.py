"""What a figure depends on beside the code: device, driver, clocks and versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

# What a run imports, by the name to install. Only tests and the scan's kernels need the others.
REQUIRED = {
    "torch": "torch",
    "numpy": "numpy",
    "typer": "typer",
    "rich": "rich",
    "pydantic": "pydantic",
    "tomli_w": "tomli-w",
    "safetensors": "safetensors",
}
FOR_TESTS = {"pytest": "pytest", "hypothesis": "hypothesis"}
CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
}
THROTTLE_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the latter before driver 535
OF_TORCH = """
import json, torch
cuda, cudnn = torch.version.cuda, torch.backends.cudnn.version()
device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps({"torch": torch.__version__, "cuda": cuda, "cudnn": cudnn, "device": device}))
"""


def missing_packages(part: str) -> list[str]:
    """Names of required packages that this interpreter cannot import."""
    wanted = {**REQUIRED, **(FOR_TESTS if part in ("tests", "all") else {})}
    return [name for module, name in wanted.items() if util.find_spec(module) is None]


def how_to_supply(missing: list[str]) -> str:
    """What to do about missing packages, in one line."""
    return (
        f"{sys.executable} lacks {', '.join(missing)}: on a machine with a network run `pip download --only-binary :all: "
        f"--python-version {sys.version_info.major}.{sys.version_info.minor} {' '.join(missing)}`, unpack the wheels here "
        "into one directory (`unzip`), and give it as PYTHONPATH"
    )


def versions() -> dict[str, str | None]:
    """Of device, driver, torch, triton, CUDA, cuDNN and Python. torch is asked in a process of its own: to import it here
    would take the memory of the device that is measured."""
    done = subprocess.run([sys.executable, "-c", OF_TORCH], capture_output=True, text=True, check=False)
    of_torch = json.loads(done.stdout) if done.returncode == 0 else {}
    driver = _query("driver_version")
    return {
        "cpu": cpu_name(),
        **{key: None if value is None else str(value) for key, value in of_torch.items()},
        "driver": driver[0] if driver else None,
        "triton": _version("triton"),
        "python": platform.python_version(),
    }


def clocks() -> dict[str, str]:
    """Of the device now, as `nvidia-smi` says; {} without it."""
    for reasons in THROTTLE_REASONS:
        if (values := _query(*CLOCKS.values(), reasons)) is not None:
            return dict(zip((*CLOCKS, "throttle_reasons"), values, strict=True))
    return {}


def _query(*fields: str) -> list[str] | None:
    """Fields of the first device; None without `nvidia-smi`, or if it does not know one of them."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return values if done.returncode == 0 and len(values) == len(fields) else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Number and name of the processors."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def commit(root: Path) -> str:
    """The commit of the checkout, with `-dirty` if it was changed; `COMMIT` of the environment where there is no git."""
    if given := os.environ.get("COMMIT"):
        return given
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
