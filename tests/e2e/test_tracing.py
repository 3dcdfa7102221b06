"""Sessions on the spans of a real server, as a collector gets them."""

import gzip
import importlib
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sam.testing.server import ServerProcess
from tests.e2e.conftest import REPO, STRICT_ENV

PACKAGES = REPO / ".cache" / "tracing"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (PACKAGES / ".sam-stamp").exists(), reason="run scripts/setup_tracing.sh first"
    ),
]
SYSTEM = {"role": "system", "content": "You are one of several careful agents. " * 30}


class Spans:
    """Takes OTLP over HTTP; `named(key)` waits for the spans that carry an attribute."""

    def __init__(self, collector):
        self.spans = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = collector.ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def named(self, key, n_spans):
        deadline = time.monotonic() + 30
        while True:
            found = [attributes_of(span) for span in list(self.spans)]
            found = [attributes for attributes in found if key in attributes]
            if len(found) >= n_spans:
                return found
            assert time.monotonic() < deadline, f"{len(found)} spans with {key}"
            time.sleep(0.2)


def value_of(value):
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(one) for one in found.values] if kind == "array_value" else found


def attributes_of(span):
    return {pair.key: value_of(pair.value) for pair in span.attributes}


@pytest.fixture(scope="module")
def collector():
    """The messages of OTLP; nothing else in this process gets to see their packages."""
    sys.path.append(str(PACKAGES))
    yield importlib.import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    sys.path.remove(str(PACKAGES))


@pytest.fixture(scope="module")
def traced(server_args, collector):
    spans = Spans(collector)
    args = server_args("--radix-cache-backend", "sam", "--enable-trace")
    args += ["--otlp-traces-endpoint", spans.url]
    env = STRICT_ENV | {
        "PYTHONPATH": str(PACKAGES),
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "200",
    }
    with ServerProcess(args, env=env) as server:
        yield server, spans
        assert "Traceback" not in server.log_text()
    spans.server.shutdown()


def ask(server, hint, text="go on"):
    body = {
        "model": "sam",
        "messages": [SYSTEM, {"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        "agent_hint": hint,
    }
    return server.request("/v1/chat/completions", body)


def test_a_request_names_its_session_and_what_was_cached(traced):
    server, spans = traced
    lineage = {"session_id": "t:coder", "parent_session_id": "t"}
    ask(server, lineage)
    offload = {"edits": [{"type": "offload", "target": "session"}]}
    ask(server, lineage | {"context_management": offload})
    ask(server, {"session_id": "t"})
    named = spans.named("gen_ai.conversation.id", 3)
    first, second, root = sorted(named, key=order)
    assert first["gen_ai.conversation.id"] == second["gen_ai.conversation.id"] == "t:coder"
    assert first["sam.session.parent_id"] == "t" and "sam.session.parent_id" not in root
    assert first["sam.cached_tokens.device"] < second["sam.cached_tokens.device"]
    assert second["sam.cached_tokens.device"] == second["gen_ai.usage.cached_tokens"]
    assert "sam.hints" not in first
    assert second["sam.hints"] in (["session.demote:accepted"], ["session.demote:done"])
    states = [one["sam.session.state"] for one in spans.named("sam.session.state", 3)]
    assert sorted(states) == ["idle", "named", "new"]
    assert "anonymous" not in str(named)


def order(attributes):
    """Requests in the order in which they were sent."""
    root = attributes["gen_ai.conversation.id"] == "t"
    return (root, attributes["gen_ai.usage.cached_tokens"])
