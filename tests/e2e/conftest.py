"""Shared parts of the end-to-end tests: the model and the standard server flags."""

from pathlib import Path

import pytest

from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS
from sam.testing.tiny_model import build_tiny_model

REPO = Path(__file__).resolve().parents[2]
STRICT_ENV = {"SAM_RAISE_ON_ERROR": "1"}


@pytest.fixture(scope="session")
def model() -> str:
    return str(build_tiny_model(REPO / ".cache" / "models" / "tiny", preset="tiny"))


@pytest.fixture(scope="session")
def server_args(model):
    """Flags of a small server; `hicache=False` leaves the host tier out."""

    def make(*extra: str, hicache: bool = True, total_tokens: int = 4096) -> list[str]:
        args = [*CPU_SERVER_ARGS, *(CPU_HICACHE_ARGS if hicache else ())]
        args += ["--model-path", model, "--max-total-tokens", str(total_tokens)]
        return [*args, *extra]

    return make
