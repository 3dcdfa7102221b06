"""A real server on the CPU platform: what comes back from L2 and L3 is what was computed.

Every prompt is answered once cold (nothing of it cached: what a server without a cache computes)
and again after other prompts pushed it out of the device pool. Text and log probabilities must
agree, in float32.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("sglang")

from sam.platform.cpu import activate
from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerFailed, ServerProcess
from sam.testing.tiny_model import build_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(activate() is None, reason="an accelerator is present"),
]

# L1 holds two prompts, L2 (ratio 2) five, so that six prompts reach L3.
PROMPT_TOKENS = 800
L1_TOKENS = 2048


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def serve(model, *extra, env=None):
    args = [*CPU_SERVER_ARGS, *CPU_HICACHE_ARGS, "--model-path", str(model)]
    return ServerProcess([*args, "--max-total-tokens", str(L1_TOKENS), *extra], env=env or {})


def random_prompts(seed, count):
    rng = random.Random(seed)
    return [[rng.randrange(300, 1700) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def ask(server, prompt):
    return server.generate(prompt, logprobs=True, max_new_tokens=12)


def assert_same_answer(one, other):
    assert one.text == other.text
    rows = [answer.meta_info["output_token_logprobs"] for answer in (one, other)]
    assert [row[1] for row in rows[0]] == [row[1] for row in rows[1]]
    assert [row[0] for row in rows[0]] == pytest.approx([row[0] for row in rows[1]], abs=1e-4)


def check_tiers(server, *, page_size, prompts):
    """Cold, host hit, device hit; returns the cold answers."""
    cold = [ask(server, prompt) for prompt in prompts]
    assert all(sum(answer.cached.values()) == 0 for answer in cold)
    reusable = (PROMPT_TOKENS - 1) // page_size * page_size
    for prompt, first in zip(prompts, cold, strict=True):
        again = ask(server, prompt)
        assert again.cached.get("host", 0) == reusable, again.cached
        assert_same_answer(again, first)
    hit = ask(server, prompts[-1])
    assert hit.cached["device"] == reusable
    assert_same_answer(hit, cold[-1])
    return cold


def assert_clean_log(server):
    text = server.log_text()
    for word in ("Traceback", "Failed to load plugin", "dropped"):
        assert word not in text, server.log_tail()


def test_host_tier_page_1(model):
    prompts = random_prompts(1, 4)
    with serve(model) as server:
        info = server.request("/server_info")
        assert info["disable_overlap_schedule"] is False
        assert info["attention_backend"] == "sam_cpu"
        cold = check_tiers(server, page_size=1, prompts=prompts)
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda prompt: ask(server, prompt), prompts))
        for answer, first in zip(together, cold, strict=True):
            assert_same_answer(answer, first)
        assert_clean_log(server)
    assert server.leftovers() == []


def test_storage_tier_page_first_direct(model, tmp_path):
    prompts = random_prompts(2, 8)
    store = tmp_path / "l3"
    args = ["--page-size", "16", "--hicache-mem-layout", "page_first_direct"]
    args += ["--hicache-storage-backend", "file"]
    args += ["--hicache-storage-prefetch-policy", "wait_complete"]
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}
    with serve(model, *args, env=env) as server:
        cold = check_tiers(server, page_size=16, prompts=prompts[:4])
        cold += [ask(server, prompt) for prompt in prompts[4:]]
        pages = PROMPT_TOKENS // 16
        wait_for(lambda: len(os.listdir(store)) >= len(prompts) * pages)
        back = ask(server, prompts[0])
        assert back.cached.get("storage", 0) > 0, back.cached
        assert_same_answer(back, cold[0])
        server.flush_cache()
        for prompt, first in zip(prompts[1:4], cold[1:4], strict=True):
            back = ask(server, prompt)
            assert back.cached["storage"] == (PROMPT_TOKENS - 1) // 16 * 16, back.cached
            assert_same_answer(back, first)
        assert_clean_log(server)


def wait_for(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "page_size"), [("layer_first", 16), ("page_first_direct", 1)])
def test_other_layouts(model, layout, page_size):
    args = ["--page-size", str(page_size), "--hicache-mem-layout", layout]
    with serve(model, *args) as server:
        check_tiers(server, page_size=page_size, prompts=random_prompts(3, 4))
        assert_clean_log(server)


@pytest.mark.slow
def test_two_ranks(model):
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with serve(model, "--tp-size", "2", env=env) as server:
        check_tiers(server, page_size=1, prompts=random_prompts(4, 4))
        assert_clean_log(server)


@pytest.mark.slow
def test_outputs_equal_stock_attention_without_cache(model):
    """The reference: SGLang's own attention, radix cache and HiCache off."""
    prompts = random_prompts(5, 2)
    args = [*CPU_SERVER_ARGS, "--model-path", str(model), "--disable-radix-cache"]
    with ServerProcess([*args, "--attention-backend", "torch_native"]) as server:
        stock = [ask(server, prompt) for prompt in prompts]
    with serve(model) as server:
        for prompt, first in zip(prompts * 2, stock * 2, strict=True):
            assert_same_answer(ask(server, prompt), first)


def test_a_dying_server_is_reported_at_once():
    start = time.monotonic()
    with (
        pytest.raises(ServerFailed, match="no-such-flag"),
        ServerProcess(["--model-path", "nowhere", "--no-such-flag"]),
    ):
        pass
    assert time.monotonic() - start < 120
