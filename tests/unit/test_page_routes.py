"""The page's routes on a FastAPI application with SGLang's own key check."""

import contextlib
import logging
import re

import pytest

pytest.importorskip("sglang")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.runtime_context import get_context
from sglang.srt.utils.auth import add_api_key_middleware
from test_ingress_parts import Server, actions_of, envelope

from sam import web
from sam.srt.entrypoints.page import LIVE, install_page

ADMIN = {"authorization": "Bearer admin"}
SESSION = {"tenant": "key-1", "session_id": "s"}
REPORT = {
    "epoch": "e",
    "seq": 1,
    "now_s": 1.0,
    "n_sessions": 1,
    "sessions": [{"tenant": "key-1", "id": "s"}],
    "n_changed": 1,
    "gone": [],
    "sweep_next": 0,
    "first_event": 0,
    "events": [],
    "series": [],
    "stories": [],
    "summary": {},
    "device_total": 4096,
}


@pytest.fixture
def make(monkeypatch):
    def build(*, keys=("api", "admin"), report=REPORT, host="127.0.0.1:30000", **config):
        server, app = Server(**config), FastAPI()

        async def query(what, **payload):
            if report is None:
                raise TimeoutError
            return report

        monkeypatch.setattr(server.ingress, "query", query)
        install_page(app, server.ingress)
        install_page(app, server.ingress)
        api_key, admin_key = keys or (None, None)
        args = get_context().override_server_args(
            model_path="none", api_key=api_key, admin_api_key=admin_key
        )
        published.enter_context(args)
        if keys:
            add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_key)
        return server, TestClient(app, base_url=f"http://{host}", follow_redirects=False)

    with contextlib.ExitStack() as published:
        yield build


def test_files_need_no_key_and_data_does(make):
    _, client = make()
    page = client.get("/sam/")
    assert page.status_code == 200 and "<!doctype html>" in page.text
    assert client.get(LIVE).status_code == 401
    assert client.get(LIVE, headers={"authorization": "Bearer api"}).status_code == 401
    assert client.get(LIVE, headers=ADMIN).json()["sessions"] == REPORT["sessions"]
    assert client.post("/sam/api/hints", json=SESSION).status_code == 401
    for path in ("/sam/__init__.py", "/sam/nothing", "/sam/../sam/__init__.py", "/samfoo"):
        assert client.get(path).status_code in (401, 404), path
    redirect = client.get("/sam")
    assert redirect.status_code == 307 and redirect.headers["location"] == "sam/"


def test_without_keys_all_may_look(make):
    _, client = make(keys=None)
    assert client.get(LIVE).status_code == 200


@pytest.mark.parametrize("name", ["", *web.FILES])
def test_each_file_is_there_with_its_policy(make, name):
    _, client = make()
    reply = client.get(f"/sam/{name}")
    assert reply.status_code == 200 and reply.content
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    again = client.get(f"/sam/{name}", headers={"if-none-match": reply.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert client.head(f"/sam/{name}").content == b""


def test_the_files_ask_nobody_else():
    """No address of another host in what is ours; the libraries name namespaces only."""
    for name in (web.INDEX, *web.FILES):
        if not name.startswith("vendor/"):
            body = web.find("" if name == web.INDEX else name).body
            addresses = re.findall(rb"https?://[^\"' )]+", body)
            assert set(addresses) <= {b"http://www.w3.org/2000/svg"}, name
    page = web.find("").body
    assert not re.search(rb"<script(?![^>]* src=)|<style| style=| on\w+=", page)


def test_a_busy_scheduler_is_503(make):
    _, client = make(report=None)
    assert client.get(LIVE, headers=ADMIN).status_code == 503


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:30000"},
        {"origin": "http://elsewhere.example"},
    ],
)
def test_other_sites_are_refused(make, headers):
    server, client = make(allow_control=True, keys=None)
    assert client.get(LIVE, headers=headers).status_code == 403
    body = {**SESSION, "action": "evict"}
    client.get(LIVE)
    assert client.post("/sam/api/hints", json=body, headers=headers).status_code == 403
    assert not server.sent
    done = client.post("/sam/api/hints", json=body).json()["message_id"]
    path, tenant = f"/sam/api/hints/{done}", {"tenant": "key-1"}
    assert client.get(path, params=tenant, headers=headers).status_code == 403
    assert client.get(path, params=tenant).status_code == 200


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_a_proxy_may_give_the_server_another_name(make, site):
    _, client = make(allow_control=True)
    headers = {**ADMIN, "sec-fetch-site": site, "origin": "https://page.example"}
    assert client.get(LIVE, headers=headers).status_code == 200
    body = {**SESSION, "action": "evict"}
    assert client.post("/sam/api/hints", json=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("keys", "host", "status"),
    [
        (None, "127.0.0.1:30000", 200),
        (None, "[::1]:30000", 200),
        (None, "localhost:30000", 200),
        (None, "rebound.example:30000", 403),
        (None, "127.0.0.1.example", 403),
        (("admin", None), "page.example", 200),
        ((None, "admin"), "page.example", 200),
    ],
)
def test_without_a_key_no_name_of_somebody_elses_controls(make, keys, host, status):
    server, client = make(allow_control=True, keys=keys, host=host)
    headers = {**ADMIN, "origin": f"http://{host}"}
    assert client.get(LIVE, headers=headers).status_code == 200
    body = {**SESSION, "action": "evict"}
    reply = client.post("/sam/api/hints", json=body, headers=headers)
    assert reply.status_code == status and len(server.sent) == (status == 200)


@pytest.mark.parametrize("flood", [{"hint_rate_per_s": 0.001}, {"max_in_flight_actions": 2}])
def test_the_operator_gets_through_beside_a_flood(make, flood):
    server, client = make(allow_control=True, **flood)
    client.get(LIVE, headers=ADMIN)
    own, n = envelope("session.evict", session_id="s"), 0

    def submit(name):
        known = server.ingress.submit_envelope({**own, "message_id": name}, "key-1")
        return known["actions"][0]["status"]

    while submit(f"m{n}") == "accepted":
        n += 1
    server.sent.clear()
    body = {**SESSION, "action": "evict"}
    reply = client.post("/sam/api/hints", json=body, headers=ADMIN).json()
    assert reply["actions"][0]["status"] == "accepted" and len(server.sent) == 1
    server.ingress.on_results(server.sent[0].message_id, [])
    assert n and submit("late") == "dropped"


def test_read_only_unless_the_operator_allows_it(make):
    server, client = make()
    assert client.get(LIVE, headers=ADMIN).json()["control"] is False
    reply = client.post("/sam/api/hints", json={**SESSION, "action": "evict"}, headers=ADMIN)
    assert reply.status_code == 403 and "--sam-allow-control" in reply.text and not server.sent


@pytest.mark.parametrize(
    ("action", "kind"),
    [("offload", "demote"), ("prefetch", "prefetch"), ("evict", "evict")],
)
def test_an_action_goes_out_in_its_owners_name(make, action, kind):
    server, client = make(allow_control=True)
    assert client.get(LIVE, headers=ADMIN).json()["control"] is True
    reply = client.post("/sam/api/hints", json={**SESSION, "action": action}, headers=ADMIN)
    (sent,) = actions_of(server.sent[0])
    assert (sent.kind, sent.key) == (f"session.{kind}", ("key-1", "s"))
    assert sent.scope == ("subtree" if action == "evict" else "session")
    path = f"/sam/api/hints/{reply.json()['message_id']}"
    known = client.get(path, params={"tenant": "key-1"}, headers=ADMIN).json()
    assert known["actions"][0]["status"] == "accepted"
    assert client.get(path, params={"tenant": "key-2"}, headers=ADMIN).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {**SESSION, "action": "flush"},
        {**SESSION, "action": "evict", "session_id": "other"},
        {**SESSION, "action": "evict", "tenant": "key-2"},
        {},
    ],
)
def test_only_known_sessions_and_actions(make, body):
    server, client = make(allow_control=True)
    client.get(LIVE, headers=ADMIN)
    assert client.post("/sam/api/hints", json=body, headers=ADMIN).status_code == 404
    assert not server.sent


def test_looks_leave_no_line_in_the_access_log(make):
    make()
    log = logging.getLogger("uvicorn.access")

    def is_logged(path, status):
        args = ("127.0.0.1:1", "GET", path, "1.1", status)
        record = log.makeRecord("uvicorn.access", logging.INFO, "", 0, "%s %s %s %s %d", args, None)
        return bool(log.filter(record))

    assert not is_logged(f"{LIVE}?version=3", 200)
    assert is_logged(LIVE, 401) and is_logged("/sam/api/hints", 200) and is_logged("/health", 200)
