"""What sam keeps per node stays within the bound, measured in fresh processes."""

import json
import subprocess
import sys

import pytest

N_NODES, N_SESSIONS = 30_000, 3_000


@pytest.mark.slow
def test_nodes_and_sessions_stay_small():
    command = [sys.executable, "-m", "sam.bench", "memory", "--json", "--serve", "200"]
    command += ["--nodes", str(N_NODES), "--sessions", str(N_SESSIONS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.stdout, run.stderr[-4_000:]
    result = json.loads(run.stdout.splitlines()[-1])
    stock, sam = result["arms"]["stock"], result["arms"]["sam"]
    assert (stock["core"], sam["core"]) == ("RustUnifiedTreeCore", "ShadowTreeCore")
    assert stock["host_tokens"] == sam["host_tokens"] > 4 * N_NODES
    # 200 MB for 100,000 nodes and 10,000 sessions.
    assert result["overhead"]["overhead_mb"] < 200 * N_NODES / 100_000
    assert sam["objects"] - stock["objects"] < 6 * N_NODES
