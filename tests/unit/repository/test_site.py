"""The site of the documentation: pages, links, and that it needs no network."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from docs.hooks import PAGES, ROOT, site_link

ELEMENTS = ("li", "table", "pre", "h2", "h3")
NOT_HERE = re.compile(r"""(?:src|href)=["']?(?:https?:)?//[^"' >]+|@import|url\(["']?(?:https?:)?//""")
"""What a browser would fetch from another host, or a link to one."""


def build(root: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


def article(page: Path) -> str:
    return page.read_text().partition("<article")[2].partition("</article>")[0]


def test_every_page_is_built_with_the_elements_of_its_source(site: Path) -> None:
    """MkDocs and code hosts read lists and blocks by different rules."""
    sources = {file.relative_to(ROOT / "docs").as_posix(): file for file in (ROOT / "docs").rglob("*.md")}
    sources |= {page: ROOT / source for source, page in PAGES.items()}
    for page, source in sources.items():
        here = article((site / page).with_suffix(".html"))
        there = MarkdownIt().enable("table").render(source.read_text())
        counts = [Counter(re.findall(rf"<({'|'.join(ELEMENTS)})\b", text)) for text in (here, there)]
        assert counts[0] == counts[1], page


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    files = [file for file in site.rglob("*") if file.suffix in (".html", ".css")]
    assert len(files) > len(PAGES)
    for file in files:
        text = re.sub(r'<(?:a|link rel="canonical")\b[^>]*>', "", file.read_text())
        assert not NOT_HERE.search(text), file


@pytest.mark.long
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    for name in ("mkdocs.yml", *PAGES):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "guide.md").open("a") as guide:
        guide.write("\n[file](missing.md), [heading](glossary.md#missing), [root](../MISSING.md)\n")
    (tmp_path / "docs" / "stray.md").touch()
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    for target in ("'missing.md'", "'glossary.md#missing'", "'../MISSING.md'", "stray.md"):
        assert target in built.stderr


@pytest.mark.parametrize(
    ("page", "target", "expected"),
    [
        ("index.md", "docs/guide.md#the-certificate", "guide.md#the-certificate"),
        ("index.md", "CONTRIBUTING.md", "contributing.md"),
        ("contributing.md", "docs/architecture.md", "architecture.md"),
        ("guide.md", "../README.md#result", "index.md#result"),
        ("how-to/one-gpu.md", "../../README.md", "../index.md"),
        ("how-to/one-gpu.md", "../engine.md", "../engine.md"),
        ("how-to/one-gpu.md", "eight-gpus.md", "eight-gpus.md"),
    ],
)
def test_links_between_the_repositorys_files_become_links_between_pages(page: str, target: str, expected: str) -> None:
    assert site_link(page, target) == expected
