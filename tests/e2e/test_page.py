"""The live page in a real browser, on a real server: it updates, steers, and stays small."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time

import pytest

from sam.testing.random_swarm import make_plan, run_swarm
from sam.testing.server import ServerProcess
from tests.e2e.conftest import STRICT_ENV

playwright_api = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: scripts/browser.sh install"
)
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: scripts/browser.sh install"),
]
expect = playwright_api.expect
ADMIN = "sk-admin"
HOSTILE = '<img src=x onerror="window.hacked=1">&amp;\u202e"\'`${1}'
N_MANY = 1_000
PHONE = {"width": 390, "height": 844}
ROW = "[role=treegrid] .row"
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def server(server_args):
    flags = ("--radix-cache-backend", "sam", "--sam-allow-control", "--sam-hint-rate-per-s", "0")
    args = server_args(*flags, "--admin-api-key", ADMIN)
    with ServerProcess(args, env=STRICT_ENV) as process:
        run_swarm(process, make_plan(1, n_sessions=4, n_turns=3), hints=True)
        yield process
        log = process.log_text()
        assert "Traceback" not in log
        assert not re.search(r"GET /sam/api/live.* 200", log), "each look would be a line"


@pytest.fixture(scope="module")
def browser():
    with playwright_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, server):
    """Opens the page as a new visitor; at the end no script failed and nothing was refused."""
    contexts, said = [], []

    def open_one(*, key=ADMIN, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.goto(f"{server.url}/sam/")
        if key is not None:
            page.get_by_label("Key").fill(key)
            page.keyboard.press("Enter")
            expect(page.locator(ROW).first).to_be_visible()
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert [line for line in said if " 401 " not in line] == []


def swarm(server, seed, **plan):
    thread = threading.Thread(
        target=run_swarm, args=(server, make_plan(seed, **plan)), kwargs={"hints": True}
    )
    thread.start()
    return thread


def row_of(page, session_id):
    name = page.locator(".id", has_text=re.compile(f"^{re.escape(session_id)}$"))
    return page.locator(ROW).filter(has=name)


def test_it_asks_for_the_key_and_keeps_it_in_the_tab(open_page):
    page = open_page(key=None)
    field = page.get_by_label("Key")
    expect(field).to_be_focused()
    field.fill("sk-wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("That is not the key.")
    page.get_by_label("Key").fill(ADMIN)
    page.keyboard.press("Enter")
    expect(page.locator(ROW).first).to_be_visible()
    assert page.evaluate("[localStorage.length, document.cookie]")[1] == ""
    assert ADMIN not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    expect(page.locator(ROW).first).to_be_visible()
    page.get_by_role("button", name="Forget key").click()
    expect(page.get_by_label("Key")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Key")).to_be_visible()


def test_it_follows_a_running_swarm(open_page, server):
    page = open_page()
    page.get_by_role("button", name=re.compile("^ended")).click()
    events = page.locator(".activity .event")
    expect(events.first).to_be_visible()
    newest = events.first.inner_text()
    running = swarm(server, 7, n_sessions=9, n_turns=4)
    expect(row_of(page, "s8")).to_be_visible()
    expect(events.first).not_to_have_text(newest, use_inner_text=True)
    running.join()
    expect(events.filter(has_text="turn finished").first).to_be_visible()
    expect(row_of(page, "s8")).to_have_attribute("aria-level", "2")
    expect(page.locator(".tile", has_text="Found in cache").locator(".big")).to_contain_text("%")
    assert page.locator("svg .fill.device").first.get_attribute("d")


def test_by_keyboard_alone(open_page):
    page = open_page()
    page.get_by_role("button", name=re.compile("^ended")).click()
    page.keyboard.press("/")
    search = page.get_by_role("searchbox")
    expect(search).to_be_focused()
    page.keyboard.type("s1")
    expect(page.locator(".row:not(.dim)")).to_have_count(1)
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "treegrid":
            break
    grid = page.get_by_role("treegrid")
    expect(grid).to_be_focused()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.keyboard.press("End")
    active = page.locator(f"#{grid.get_attribute('aria-activedescendant')}")
    expect(active).to_contain_text("s1")
    page.keyboard.press("Enter")
    story = page.get_by_role("complementary", name="Story of one session")
    expect(story.get_by_role("heading")).to_be_focused()
    expect(story.get_by_role("img")).to_have_attribute("aria-label", re.compile(r"\d+ turns"))
    expect(story.locator(".spell").first).to_be_visible()
    expect(story.locator(".event").filter(has_text="turn finished").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(story).to_have_count(0)
    expect(grid).to_be_focused()


def test_it_steers_where_that_is_allowed(open_page, server):
    running = swarm(server, 11, n_sessions=2, n_turns=2)
    running.join()
    page = open_page()
    page.get_by_role("button", name=re.compile("^ended")).click()
    row = row_of(page, "s1")
    row.click()
    story = page.get_by_role("complementary", name="Story of one session")
    notice = page.locator(".notice")
    story.get_by_role("button", name="prefetch").click()
    expect(notice).to_contain_text("prefetch of s1: ")
    story.get_by_role("button", name="evict").click()
    expect(story.get_by_role("button", name="Really evict")).to_be_visible()
    expect(notice).not_to_contain_text("evict")
    story.get_by_role("button", name="Really evict").click()
    expect(notice).to_contain_text(re.compile("evict of s1: (done|missing)"))
    expect(row).to_contain_text("ended")
    expect(story.locator(".event").filter(has_text="evict").first).to_be_visible()


def test_read_only_offers_nothing(open_page):
    page = open_page(key=None)

    def without_control(route):
        news = route.fetch()
        route.fulfill(response=news, json={**news.json(), "control": False})

    page.route("**/sam/api/live*", without_control)
    page.get_by_label("Key").fill(ADMIN)
    page.keyboard.press("Enter")
    page.get_by_role("button", name=re.compile("^ended")).click()
    page.locator(ROW).first.click()
    story = page.get_by_role("complementary", name="Story of one session")
    expect(story).to_contain_text("--sam-allow-control")
    assert story.locator(".controls").count() == 0
    page.unroute_all(behavior="ignoreErrors")


def bind_many(server, at, n_tries=60):
    """Fifty sessions; a server with much under way takes them a little later."""
    for attempt in range(n_tries):
        actions = [
            {
                "action_id": f"b{i}",
                "action_type": "session.bind",
                "action_version": "0.1",
                "payload": {"session_id": f"{HOSTILE}:{i:04d}", "parent_session_id": HOSTILE},
            }
            for i in range(at, at + 50)
        ]
        envelope = {"protocol_version": "0.1", "message_id": f"many-{at}-{attempt}"}
        reply = server.request("/kv_hints", envelope | {"actions": actions})
        if {action["status"] for action in reply["actions"]} <= {"accepted", "done"}:
            return
        time.sleep(0.5)
    raise AssertionError(reply)


def test_a_thousand_sessions_with_hostile_ids(open_page, server):
    for at in range(0, N_MANY, 50):
        bind_many(server, at)
    page = open_page()
    grid = page.get_by_role("treegrid")
    expect(grid).to_have_attribute("aria-rowcount", re.compile(r"^1\d{3}$"))
    assert page.locator(ROW).count() < 100, "only the rows in sight are drawn"
    grid.focus()
    page.keyboard.press("End")
    search = page.get_by_role("searchbox")
    search.fill(":0999")
    expect(page.locator(".row:not(.dim)")).to_have_count(1)
    expect(page.locator(".row:not(.dim) .id")).to_have_text(f"{HOSTILE}:0999")
    page.locator(".row:not(.dim)").click()
    story = page.get_by_role("complementary", name="Story of one session")
    expect(story.get_by_role("heading")).to_have_text(f"{HOSTILE}:0999")
    expect(story.locator(".event").first).to_be_visible()
    assert page.evaluate("window.hacked") is None
    assert page.locator("#page img:not(.bar-top img)").count() == 0
    page.keyboard.press("Escape")
    search.fill("")
    expect(grid).to_have_attribute("aria-rowcount", re.compile(r"^1\d{3}$"))
    row_of(page, HOSTILE).locator(".fold").click()
    expect(grid).to_have_attribute("aria-rowcount", re.compile(r"^\d{1,3}$"))


def test_light_dark_and_by_choice(open_page):
    page = open_page(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert dark != light
    theme = page.get_by_role("button", name="Colours")
    theme.click()
    theme.click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate(ground) == dark
    page.reload()
    expect(page.locator(ROW).first).to_be_visible()
    assert page.evaluate(ground) == dark


def test_on_a_phone(open_page):
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.get_by_role("button", name=re.compile("^ended")).tap()
    page.locator(ROW).first.tap()
    story = page.get_by_role("complementary", name="Story of one session")
    expect(story).to_be_visible()
    box = story.bounding_box()
    assert (box["x"], box["y"]) == (0, 0) and box["width"] == PHONE["width"]
    close = page.get_by_role("button", name="Close the story")
    assert close.bounding_box()["height"] >= 40
    close.tap()
    expect(story).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_in_the_background_it_asks_nothing(open_page):
    """Nobody looks at a hidden tab."""
    page = open_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate(
        """() => {
          Object.defineProperty(document, "hidden", { value: true, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    page.wait_for_timeout(1_500)
    asked.clear()
    page.wait_for_timeout(3_000)
    assert asked == []
    page.evaluate("() => { delete document.hidden; }")
    with page.expect_request("**/sam/api/live*"):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
