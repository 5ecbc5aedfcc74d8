"""Hooks of MkDocs: files outside of docs/ become pages, and links to them lead to these pages."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
}
"""Page of the site by file of the repository."""
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    return _LINK.sub(lambda link: link[1] + site_link(page.file.src_uri, link[2]), markdown)


def site_link(page: str, target: str) -> str:
    """Return the link on a page of the site for a link that its source has in the repository."""
    path, mark, anchor = target.partition("#")
    file = normpath(join(dirname(_SOURCES.get(page, f"docs/{page}")), path))
    return relpath(PAGES.get(file, relpath(file, "docs")), dirname(page) or ".") + mark + anchor
