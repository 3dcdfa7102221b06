"""What a cache hit is worth on the CPU platform: recompute, device hit, host hit, decode.

Owns: one measurement of the attention backends on a real server, stock `torch_native` beside ours.
Must never be read as a benchmark of SGLang: it compares two ways to compute the same outputs.

Run: python -m sam.bench.attention [--json] [--preset small] [--prompt-tokens 2000]
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sam.platform.cpu import ATTENTION_BACKEND
from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerProcess
from sam.testing.tiny_model import PRESETS, build_tiny_model

BACKENDS = ("torch_native", ATTENTION_BACKEND)


@dataclass(frozen=True)
class Timing:
    """Best of the rounds, in milliseconds; the first three for a whole request of one token.

    The best, not the median: other work on the machine only ever adds.
    """

    backend: str
    prompt_tokens: int
    recompute_ms: float
    device_hit_ms: float
    host_hit_ms: float
    decode_ms_per_token: float
    batch_decode_ms_per_step: float
    text: str


def measure(backend: str, model: Path, *, prompt_tokens: int, rounds: int, dtype: str) -> Timing:
    """Start a server with `backend`, run the phases on fresh random prompts, stop it."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    rng = random.Random(1)

    def fresh() -> list[int]:
        return [rng.randrange(300, vocab - 300) for _ in range(prompt_tokens)]

    args = [*CPU_SERVER_ARGS, *CPU_HICACHE_ARGS, "--model-path", str(model), "--dtype", dtype]
    # L1 holds two prompts, L2 four times that: `rounds` prompts are evicted, and come back.
    args += ["--max-total-tokens", str(2 * prompt_tokens + 512), "--hicache-ratio", "4"]
    if backend != ATTENTION_BACKEND:  # ours is the platform's default
        args += ["--attention-backend", backend]
    with ServerProcess(args) as server:
        used = server.request("/server_info")["attention_backend"]
        if used != backend:
            raise RuntimeError(f"the server runs attention backend {used}, not {backend}")
        server.generate(fresh(), max_new_tokens=2)
        prompts = [fresh() for _ in range(rounds)]
        cold, device, host = [], [], []
        for prompt in prompts:
            cold.append(server.generate(prompt, max_new_tokens=1).seconds)
            device.append(server.generate(prompt, max_new_tokens=1).seconds)
        for prompt in prompts:
            answer = server.generate(prompt, max_new_tokens=1)
            if answer.cached.get("host", 0) > prompt_tokens // 2:
                host.append(answer.seconds)
        if not host:
            raise RuntimeError("no prompt came back from the host tier: raise --rounds")
        few = min(server.generate(prompt, max_new_tokens=1).seconds for _ in range(3))
        runs = [server.generate(prompt, max_new_tokens=33) for _ in range(3)]
        many = min(runs, key=lambda run: run.seconds)
        batch = _batch_step_ms(server, prompt)
    return Timing(
        backend,
        prompt_tokens,
        1e3 * min(cold),
        1e3 * min(device),
        1e3 * min(host),
        1e3 * (many.seconds - few) / 32,
        batch,
        many.text,
    )


def _batch_step_ms(server: ServerProcess, prompt: list[int]) -> float:
    """Milliseconds per decode step of 8 requests that share `prompt`."""

    def run(tokens: int) -> float:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": [prompt] * 8, "sampling_params": sampling}
        start = time.perf_counter()
        server.request("/generate", body)
        return time.perf_counter() - start

    few = min(run(1) for _ in range(3))
    return 1e3 * (min(run(17) for _ in range(3)) - few) / 16


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sam-bench-") as folder:
        model = build_tiny_model(Path(folder) / args.preset, preset=args.preset)
        results = [
            measure(
                backend,
                model,
                prompt_tokens=args.prompt_tokens,
                rounds=args.rounds,
                dtype=args.dtype,
            )
            for backend in BACKENDS
        ]
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return 0
    for result in results:
        for name, value in asdict(result).items():
            if isinstance(value, float):
                print(f"{result.backend:14}{name:28}{value:10.1f}")
    print(f"same greedy text: {results[0].text == results[1].text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
