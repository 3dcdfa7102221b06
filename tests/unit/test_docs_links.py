"""Every link between documents leads somewhere: file, folder or heading."""

import re

import pytest

from tests.unit.docs_pages import REPO, anchors, links, pages

PAGES = pages()


def wrong(page, target):
    """Why a link of a page leads nowhere; empty if it leads somewhere or out of here."""
    if re.match(r"[a-z]+:", target):
        return ""
    name, _, anchor = target.partition("#")
    place = (page.parent / name).resolve() if name else page
    if not place.is_relative_to(REPO):
        return "leaves the repository"
    if not place.exists():
        return "no such file"
    if anchor and anchor not in anchors(place):
        return f"no such heading; there are {', '.join(sorted(anchors(place)))}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(REPO)) for page in PAGES])
def test_links_lead_somewhere(page):
    found = [(line, target, wrong(page, target)) for line, target in links(page)]
    assert [bad for bad in found if bad[2]] == []


def test_links_that_lead_nowhere_are_found(tmp_path):
    page = REPO / "docs" / "README.md"
    assert wrong(page, "nowhere.md") == "no such file"
    assert wrong(page, "../../elsewhere.md") == "leaves the repository"
    assert wrong(page, "operating.md#nowhere").startswith("no such heading")
    assert wrong(page, "operating.md#the-patch-tools-exit-codes") == ""
    assert len([link for page in PAGES for link in links(page)]) > 30
