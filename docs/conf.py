"""The documents as a site: read by Sphinx (`scripts/docs.sh`), which starts at the repository.

Owns which pages there are and in which order. Must never change a source file, nor silence a
link that leads nowhere: each warning fails the build. Nothing is fetched when a page is read.
"""

from __future__ import annotations

from pathlib import Path

project = "sam"
author = "the sam maintainers"
copyright = "the sam maintainers, Apache-2.0"
html_title = "sam"
root_doc = "docs/README"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
OUTSIDE = ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md")
include_patterns = ["docs/**", *OUTSIDE, "sam/README.md", "patches/README.md"]
exclude_patterns = [".*", "build", "dist", "*.egg-info", "**/__pycache__"]
myst_heading_anchors = 4
highlight_language = "none"

html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False

SECTIONS = {
    "Start": ["docs/quickstart", "README", "README.zh"],
    "Use": ["docs/how-it-decides", "docs/cookbook", "docs/client", "docs/cli", "docs/page"],
    "Operate": ["docs/operating", "docs/pool", "docs/troubleshooting"],
    "Reference": ["docs/protocol", "docs/protocol-reference"],
    "Measure": ["docs/benchmarks", "docs/simulator", "docs/benchmarks/*"],
    "Contribute": ["CONTRIBUTING", "sam/README", "patches/README", "CHANGELOG"],
    "Hand upstream": ["docs/upstream/README", "docs/upstream/*"],
    "More": ["docs/*"],
}
TITLES = {"README": "What it is", "README.zh": "这是什么", "docs/operating": "Operating guide"}
_REPO = Path(__file__).resolve().parent.parent


def tables_of_contents() -> str:
    """One toctree a section, of the pages that are there; each page once."""
    used = {root_doc}
    text = ""
    for title, patterns in SECTIONS.items():
        found = [
            path.relative_to(_REPO).with_suffix("").as_posix()
            for pattern in patterns
            for path in sorted(_REPO.glob(f"{pattern}.md"))
        ]
        pages = [page for page in dict.fromkeys(found) if page not in used]
        used.update(pages)
        if pages:
            entries = "\n".join(_entry(page) for page in pages)
            text += f"\n```{{toctree}}\n:caption: {title}\n:hidden:\n\n{entries}\n```\n"
    return text


def _entry(page: str) -> str:
    return f"{TITLES[page]} </{page}>" if page in TITLES else f"/{page}"


def _add_contents(app: object, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += tables_of_contents()


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_contents)
