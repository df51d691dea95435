"""mkdocs hooks: repository documents as pages, and links between those and docs/.

Documents outside docs/ (README.md, ARCHITECTURE.md, ...) are shown on the site as well. Links in all documents are
written for readers of the repository, relative to the document's own directory; these hooks turn them into links of the
site. A link to a file that exists but is not on the site becomes plain text; a link to a missing file is a warning,
which ``mkdocs build --strict`` turns into an error.
"""

import logging
import posixpath
import re
import typing
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.plugins.lamina")

ROOT = Path(__file__).parents[1]

PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "deploy/README.md": "deploying.md",
    "bench/README.md": "benchmarks.md",
    "bench/cost/README.md": "cost-report.md",
} | {f"bench/results/{picture.name}": f"images/{picture.name}" for picture in (ROOT / "bench/results").glob("*.svg")}
"""Documents and pictures outside docs/, by their path in the repository, and the file of the site that each becomes."""

_MARKDOWN_LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^][`]|`[^`]*`)+)\]\((?P<target>[^)\s]+)\)")
_IMAGE = re.compile(r"(?P<before>(?:src|srcset)=\"|!\[[^]]*\]\()(?P<target>[^\")\s]+)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of ``PAGES``."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links of the repository as links of the site, outside code blocks."""
    fences: list[str] = []

    def keep(match: re.Match[str]) -> str:
        fences.append(match.group())
        return f"\0{len(fences) - 1}\0"

    markdown = _FENCE.sub(keep, markdown)
    uri = page.file.src_uri
    markdown = _MARKDOWN_LINK.sub(lambda match: _link(match, uri), markdown)
    markdown = _IMAGE.sub(lambda match: match["before"] + _on_site(match["target"], uri, match["target"]), markdown)
    return re.sub(r"\0(\d+)\0", lambda match: fences[int(match[1])], markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out the roles of Sphinx in docstrings, such as the ":meth:" in front of a method's name."""
    return re.sub(r":(?:meth|class|func|attr|mod):(?=<code>)", "", html)


def _link(match: re.Match[str], uri: str) -> str:
    target = _on_site(match["target"], uri, None)
    return match["text"] if target is None else f"[{match['text']}]({target})"


@typing.overload
def _on_site(target: str, uri: str, otherwise: str) -> str: ...
@typing.overload
def _on_site(target: str, uri: str, otherwise: None) -> str | None: ...
def _on_site(target: str, uri: str, otherwise: str | None) -> str | None:
    """Where ``target``, a link in page ``uri``, is on the site; ``otherwise`` if the site leaves that file out."""
    path, hash_sign, anchor = target.partition("#")
    if not path or "://" in target or target.startswith("mailto:"):
        return target
    source = {page: document for document, page in PAGES.items()}.get(uri, f"docs/{uri}")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = PAGES.get(found, found.removeprefix("docs/") if found.startswith("docs/") else None)
    if not (ROOT / found).exists():
        log.warning("%s links to %s, which does not exist", source, target)
    if page is None or (ROOT / found).is_dir():
        return otherwise
    return posixpath.relpath(page, posixpath.dirname(uri) or ".") + hash_sign + anchor
