"""A page in a real browser: Debian's chromium, headless, driven by playwright. Nothing is ever downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def chromium() -> str:
    """The browser's path. Without one the test is skipped, and says why; in CI, which installs it, it fails."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is not None:
        return found
    reason = f"no browser on this machine (looked for {', '.join(NAMES)}); on Debian: apt-get install chromium"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}. CI must have one: see .ci/run")
    pytest.skip(reason)


@dataclass
class Opened:
    """A page, and what went wrong in it."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def opened(file: Path, *, scheme: str = "light") -> Iterator[Opened]:
    """Open a page and wait for its first chart; collects console errors, warnings, exceptions and every request for another
    file or server."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The sandbox needs rights that a container's root does not have; only our own page is opened.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme).new_page()
            seen = Opened(page)
            page.on("console", lambda m: seen.complaints.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: seen.complaints.append(str(error)))
            url = file.resolve().as_uri()
            page.on("request", lambda r: None if r.url.partition("#")[0] == url else seen.requests.append(r.url))
            page.goto(url)
            page.locator(".plot .main-svg").first.wait_for()
            yield seen
        finally:
            browser.close()
