"""What goes wrong between `sam` and whatever answers, over real sockets."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from sam.cli import hints, main, top
from sam.cli.errors import CliError, Exit
from sam.cli.server import Server

SUMMARY = {
    "counters": {},
    "actions": {},
    "pending_actions": 0,
    "errors": 0,
    "device": {"free": 6, "evictable": 3, "protected": 1},
    "host": None,
}
REPORT = json.dumps({"offset": 0, "n_sessions": 0, "sessions": [], "summary": SUMMARY})


@pytest.fixture
def answering():
    """Starts a server that gives (status, body, headers) to each request in turn, the last one
    for ever; returns its URL and the list of requests."""
    servers = []

    def start(*answers):
        seen = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, body, headers = answers[min(len(seen), len(answers) - 1)]
                seen.append((self.path, dict(self.headers)))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body.encode())

            do_POST = do_GET

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "code", "words"),
    [
        (401, '{"error": "Unauthorized"}', Exit.REFUSED, "refuses the API key"),
        (403, "", Exit.REFUSED, "refuses the API key"),
        (404, '{"detail": "Not Found"}', Exit.NOT_SAM, "no SGLang server with sam"),
        (302, "", Exit.NOT_SAM, "no SGLang server with sam"),
        (400, '{"error": {"message": "bad action"}}', Exit.USAGE, "malformed: bad action"),
        (422, '{"detail": [1]}', Exit.USAGE, "malformed"),
        (503, '{"error": {"message": "the scheduler is busy"}}', Exit.NO_SERVER, "is busy"),
        (501, "<!DOCTYPE HTML>", Exit.NOT_SAM, "it answered 501"),
        (502, "<html><h1>Bad Gateway</h1></html>", Exit.NO_SERVER, "502: a page of HTML"),
        (500, "Internal Server Error", Exit.NO_SERVER, "Internal Server Error"),
        (404, '{"error": {"message": "unknown message_id, gone"}}', Exit.UNKNOWN, "unknown mess"),
        (200, "<html>", Exit.NOT_SAM, "no JSON"),
    ],
)
def test_refusals(answering, status, body, code, words):
    url, _ = answering((status, body, {}))
    with pytest.raises(CliError) as failure:
        Server(url, "sk-secret").get("/sessions")
    assert failure.value.code is code and words in failure.value.message
    assert "sk-secret" not in failure.value.message + failure.value.remedy


def test_a_redirect_does_not_carry_the_key_elsewhere(answering):
    elsewhere, seen_there = answering((200, REPORT, {}))
    url, seen = answering((302, "", {"Location": f"{elsewhere}/sessions"}))
    with pytest.raises(CliError):
        Server(url, "sk-secret").get("/sessions")
    assert len(seen) == 1 and not seen_there
    assert seen[0][1]["Authorization"] == "Bearer sk-secret"


def test_the_query_leaves_out_what_is_not_given(answering):
    url, seen = answering((200, "{}", {}))
    Server(f"{url}/v1/", None).get("/kv_hints/x", cache_salt="a b", extra_key=None)
    assert seen[0][0] == "/kv_hints/x?cache_salt=a+b" and "Authorization" not in seen[0][1]


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://x", "http://", ""])
def test_what_is_no_address(url):
    with pytest.raises(CliError) as failure:
        Server(url)
    assert failure.value.code is Exit.USAGE


def test_nobody_there():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(CliError) as failure:
        Server(f"http://127.0.0.1:{port}").get("/sessions")
    assert failure.value.code is Exit.NO_SERVER and "SAM_URL" in failure.value.remedy


@pytest.mark.parametrize("greeting", [None, b"SSH-2.0-OpenSSH\r\n"])
def test_silence_and_other_protocols(greeting):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            connection.recv(4096)
            if greeting is not None:
                connection.sendall(greeting)
                connection.close()
            else:
                time.sleep(2)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(CliError) as failure:
            Server(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2).get("/x")
    assert failure.value.code is (Exit.NO_SERVER if greeting is None else Exit.NOT_SAM)


def test_json_of_a_failure(answering, capsys):
    url, _ = answering((401, "", {}))
    code = main(["sessions", "--url", url, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == report["exit_code"] == Exit.REFUSED and "SAM_API_KEY" in report["remedy"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hint offload --json", "Missing argument"),
        ("sessions --json --state asleep", "'asleep' is not one of"),
        ("hint retain x --ttl -5 --json", "greater than or equal to 0"),
        ("nothing --json", "No such command"),
        ("sessions --json --nothing", "No such option"),
        ("hint evict x --messages 5:2 --json", "no range"),
    ],
)
def test_json_of_a_wrong_command_line(line, words, capsys):
    code = main(line.split())
    report = json.loads(capsys.readouterr().out)
    assert code == report["exit_code"] == Exit.USAGE and words in report["error"]


def test_a_server_that_is_not_sams(answering, capsys):
    url, _ = answering((200, '{"sessions": {}}', {}))
    assert main(["sessions", "--url", url]) == Exit.NOT_SAM


def test_top_outlives_a_short_absence(answering):
    url, _ = answering((200, REPORT, {}), (200, REPORT, {}), (503, "", {}), (200, REPORT, {}))
    looks = list(top.frames(Server(url), top.Pace(0.01, 3, 100)))
    assert [bool(frame.problem) for frame in looks] == [False, True, False]
    assert all(frame.report["summary"] == SUMMARY for frame in looks)
    url, _ = answering((401, "", {}))
    with pytest.raises(CliError):
        next(top.frames(Server(url), top.Pace(0.01, None, 100)))


def test_top_looks_at_the_newest_only(answering):
    many = json.dumps(json.loads(REPORT) | {"n_sessions": 5_000})
    url, seen = answering((200, many, {}))
    frame = next(top.frames(Server(url), top.Pace(0.01, 1, 100)))
    asked = [path for path, _ in seen]
    assert asked == ["/sessions?offset=0&limit=1", "/sessions?offset=4900&limit=100"]
    shown = io.StringIO()
    Console(file=shown, width=200).print(top.frame_view(frame, url, 5))
    assert "and 5,000 older ones" in shown.getvalue()


def test_interrupted(answering):
    url, _ = answering((200, REPORT, {}))
    command = [sys.executable, "-m", "sam.cli", "top", "--json", "--interval", "0.2", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline())["n_sessions"] == 0
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == Exit.INTERRUPTED and b"Traceback" not in err


def test_address_and_key_from_the_environment(answering, capsys, monkeypatch):
    url, seen = answering((200, REPORT, {}))
    monkeypatch.setenv("SAM_URL", url)
    monkeypatch.setenv("SAM_API_KEY", "sk-from-env")
    assert main(["sessions", "--json"]) == Exit.OK
    assert seen[0][1]["Authorization"] == "Bearer sk-from-env"
    assert json.loads(capsys.readouterr().out)["n_sessions"] == 0


def test_any_message_id_is_asked_for_as_it_is(answering):
    def message(status):
        action = {"action_id": "a", "action_type": "session.evict", "status": status, "reason": ""}
        return json.dumps({"message_id": "run/7?x=1#y", "actions": [action]})

    url, seen = answering((200, message("accepted"), {}), (200, message("done"), {}))
    found = hints.send(Server(url, None), {"cache_salt": "s", "actions": []}, 10.0)
    assert found["actions"][0]["status"] == "done"
    assert [path for path, _ in seen] == [
        "/kv_hints", "/kv_hints/run%2F7%3Fx%3D1%23y?cache_salt=s",
    ]  # fmt: skip
