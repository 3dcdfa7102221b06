"""Every command in the documents could be run, or says why it is not."""

import subprocess

import pytest

from tests.unit.docs_commands import SHELL, commands, problem
from tests.unit.docs_pages import REPO, blocks, pages

BLOCKS = [block for page in pages() for block in blocks(page)]
SHELL_BLOCKS = [block for block in BLOCKS if block.language in SHELL]
PYTHON_BLOCKS = [block for block in BLOCKS if block.language == "python"]
OTHERS = {"text", "json", "diff", "python", "yaml", "toml", "ini", "html", "javascript"}


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=map(str, SHELL_BLOCKS))
def test_commands_could_be_run(block):
    syntax = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert syntax.returncode == 0, syntax.stderr
    if block.not_run:
        return
    found = commands(block.text)
    assert found, "no commands: say ```text"
    wrong = {" ".join(words): problem(words) for words in found}
    assert {line: why for line, why in wrong.items() if why} == {}


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=map(str, PYTHON_BLOCKS))
def test_programs_compile(block):
    compile(block.text, str(block), "exec")


def test_a_block_that_is_no_command_says_what_it_is():
    unknown = {str(block): block.language for block in BLOCKS if block.language not in SHELL}
    assert {one: lang for one, lang in unknown.items() if lang not in OTHERS} == {}


@pytest.mark.parametrize(
    "line",
    [
        "scripts/nowhere.sh",
        "scripts/quickstart.sh --no-such-option",
        "scripts/apply_patches.sh unapply",
        "sam nothing",
        "sam hint offload x --no-such-option",
        "sam sessions --state asleep",
        "sam bench nothing",
        "sam bench replay --no-such-option",
        "python -m sglang.launch_server --model-path MODEL --no-such-option",
        "python -m sglang.launch_server --hicache-write-policy never",
        "python -m sam.sim --no-such-option",
        "make nothing",
        "pip install -e '.[nothing]'",
        "rm -rf build",
    ],
)
def test_commands_that_could_not_be_run_are_found(line):
    (words,) = commands(line)
    assert problem(words)


def test_reasons_are_given():
    reasons = [block.not_run for block in BLOCKS if block.not_run]
    assert all(len(reason) > 10 for reason in reasons)
    assert len(SHELL_BLOCKS) > 25 and REPO.is_dir()
