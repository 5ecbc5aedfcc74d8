"""The site of the documentation in a real browser."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.programs.browser import LAPTOP, PHONE
from tests.values.parameters import parameters

ROOT = Path(__file__).parents[3]
FIELD, FOUND = "input[name=query]", ".md-search-result__item a"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.mark.parametrize("options", parameters({"laptop": LAPTOP, "phone": PHONE}, short=("phone",)))
def test_pages_that_are_opened_as_files_can_be_searched(browser: Browser, site: Path, options: dict[str, Any]) -> None:
    page = browser.new_context(offline=True, **options).new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "how-to" / "one-gpu.html").as_uri())
    if options is PHONE:
        page.click("label[for=__search].md-header__button")
    page.click(FIELD)
    page.keyboard.type("recompute")
    page.click(FOUND)
    page.wait_for_url("**/methods.html")
    assert not [url for url in asked if not url.startswith("file:")]
