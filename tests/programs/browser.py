"""A headless Chromium of the system, and pages in it that may load nothing but themselves."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDED = (
    "THE REPORT IS NOT TESTED IN A BROWSER: none of chromium, chromium-browser and google-chrome is installed; "
    "`apt-get install chromium` provides one"
)
LAPTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


@dataclass
class Opened:
    """A page with what it said and asked for since it was opened."""

    page: Page
    said: list[str] = field(default_factory=list)
    """Messages on the console, and errors."""
    asked: list[str] = field(default_factory=list)
    """URLs of all requests."""

    def value(self, expression: str) -> Any:
        return self.page.evaluate(expression)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Provide the browser. It needs no sandbox for a page of our own, and has none as root."""
    assert CHROMIUM
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, file: Path, **options: Any) -> Iterator[Opened]:
    """Open a report, and wait until its charts are drawn."""
    context = browser.new_context(offline=True, **options)
    try:
        found = Opened(page=context.new_page())
        found.page.on("console", lambda message: found.said.append(message.text))
        found.page.on("pageerror", lambda error: found.said.append(str(error)))
        found.page.on("dialog", lambda dialog: found.said.append(dialog.message))
        found.page.on("request", lambda request: found.asked.append(request.url))
        found.page.goto(file.as_uri())
        found.page.wait_for_function("document.documentElement.dataset.drawn", timeout=60_000)
        yield found
    finally:
        context.close()
