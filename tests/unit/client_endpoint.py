"""An OpenAI-compatible endpoint on the loopback interface that keeps the bodies it gets."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "hello"},
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


class Endpoint(ThreadingHTTPServer):
    """Answers `status`, management requests after `delay_s`; `bodies` in order of arrival."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = []
        self.status = 200
        self.delay_s = 0.0

    def handle_error(self, request, client_address):
        """A client that did not wait for its answer is no error here."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def hints(self):
        return [body["agent_hint"] for body in self.bodies]

    def managed(self):
        """Hints of management requests, as (session id, edit types, expected_idle_s)."""
        found = []
        for hint in self.hints:
            management = hint.get("context_management") or {}
            if management.get("manage_request"):
                edits = "+".join(edit["type"] for edit in management["edits"])
                found.append((hint["session_id"], edits, hint.get("expected_idle_s")))
        return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if not body["messages"]:
            time.sleep(self.server.delay_s)
        if body.get("stream") and self.server.status == 200:
            self._stream()
            return
        data = json.dumps(ANSWER).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for text in ("hel", "lo"):
            choice = {"index": 0, "delta": {"content": text}}
            chunk = {**ANSWER, "object": "chat.completion.chunk", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def log_message(self, *args):
        pass


@contextmanager
def endpoint():
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
