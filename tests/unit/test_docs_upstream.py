"""Each patch has the text of its pull request, in upstream's template, and the texts are true."""

import re

import pytest

from tests.unit.docs_pages import REPO

SECTIONS = [
    "## Motivation",
    "## Modifications",
    "## Accuracy tests",
    "## Benchmark and profiling",
    "## Checklist",
]
LINES = (REPO / "patches" / "series").read_text().splitlines()
SERIES = [line.strip() for line in LINES if line.strip() and not line.startswith("#")]


@pytest.fixture(params=SERIES)
def patch(request):
    text = (REPO / "docs" / "upstream" / request.param).with_suffix(".md").read_text()
    return (REPO / "patches" / request.param).read_text(), text


def test_the_text_has_upstreams_sections(patch):
    _, text = patch
    assert re.findall(r"^## .*", text, re.M) == SECTIONS
    assert "TODO" not in text


def test_title_and_test_are_those_of_the_patch(patch):
    diff, text = patch
    title = re.search(r"^Subject: \[PATCH\] (.*)", diff, re.M)[1]
    assert text.startswith(f"# {title}\n")
    assert re.search(r"^Test: (.*)", diff, re.M)[1] in text


def test_tests_that_a_text_names_exist(patch):
    diff, text = patch
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in diff
    for path in re.findall(r"`((?:tests|sam|scripts)/[\w/]+\.(?:py|sh))`", text):
        assert (REPO / path).is_file(), path


def test_a_dependency_is_said(patch):
    diff, text = patch
    assert ("Depends-On:" in diff) == text.split("\n\n")[1].startswith("Depends on ")


def test_there_is_a_page_for_nothing_else():
    there = {path.stem for path in (REPO / "docs" / "upstream").glob("*.md")} - {"README"}
    assert there == {name.removesuffix(".patch") for name in SERIES}
