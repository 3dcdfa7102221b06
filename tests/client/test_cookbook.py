"""The cookbook's openJiuwen recipe, as it is written, in each version's environment."""

import os
import subprocess

from tests.client.conftest import API_KEY, ENVS, REPO
from tests.unit.docs_pages import blocks


def test_the_recipe_runs(server, client, tmp_path):
    pages = blocks(REPO / "docs" / "cookbook.md")
    (program,) = [block.text for block in pages if "AscendAffinity" in block.text]
    env = os.environ | {"SAM_URL": server.url, "SAM_API_KEY": API_KEY}
    python = ENVS / f"openjiuwen-{client.version}" / "bin" / "python"
    line = [str(python), "-c", program]
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    fixer = server.sessions()["jiuwen:fixer"]
    assert (fixer["state"], fixer["parent_session_id"]) == ("idle", "jiuwen")
    assert fixer["tokens"]["device"]["private"] + fixer["tokens"]["device"]["shared"] > 0
