"""The web UI of ``dask cml serve`` in Chromium: a real server with real clusters."""

import re
from urllib.parse import urlsplit

import pytest
from distributed import Client
from lab import PATIENCE, Pane, browser, chromium, pictured, until
from served import PageServer

from dask_cml.records import store

pytestmark = pytest.mark.slow

#: What every test's cluster runs with: a worker without a nanny starts in half of the time.
VARIABLES = {"DASK_CML__WORKER_ARGS": "['--no-nanny']", "DASK_CML__CPU": "1", "DASK_CML__MEMORY": "1"}


@pytest.fixture(scope="module")
def chrome(shared_platform):
    if chromium() is None:
        pytest.skip("Chromium is not installed")
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(shared_platform, tmp_path_factory):
    with PageServer(tmp_path_factory.mktemp("serve"), variables=VARIABLES) as server:
        yield server


@pytest.fixture(scope="module")
def night(server):
    """A cluster that the tests share. Each test scales it back to one worker."""
    server.create("night", n_workers=1)
    return "night"


@pytest.fixture
def opened(chrome, server, request, tmp_path):
    """Open a page. If the test fails, save screenshots."""
    pages = []
    with pictured(request, tmp_path, server) as contexts:

        def opened(path="", server=server, **more):
            context = chrome.new_context(viewport={"width": 1280, "height": 900}, **more)
            contexts.append(context)
            page = context.new_page()
            pages.append(page)
            page.set_default_timeout(PATIENCE * 1000)
            page.errors = []
            page.on("pageerror", lambda error: page.errors.append(str(error)))
            page.goto(server.link)
            page.home = page.url.partition("?")[0]
            if path:
                page.goto(page.home + path)
            return page

        yield opened
    assert [error for page in pages for error in page.errors] == []


def row(page, name):
    return page.locator("table.clusters tbody").filter(has=page.get_by_role("link", name=name, exact=True))


def has_workers(page, n):
    """Wait until exactly n workers of the default group are connected."""
    cell = page.locator('#group-default [data-label="Workers"]')
    cell.filter(has_text=re.compile(rf"^\s*{n}\s*$")).wait_for()


def test_the_list_refreshes_itself(opened, server):
    page = opened()
    page.evaluate("window.opened = 'once'")
    assert "token" not in page.url
    server.create("day", n_workers=1)
    shown = row(page, "day")
    shown.filter(has_text="running").wait_for()
    shown.filter(has=page.locator('[data-label="Threads"]', has_text=re.compile("^1$"))).wait_for()
    page.get_by_role("link", name="New cluster").focus()
    assert server.ask("DELETE", "api/clusters/day")[0] == 200
    shown.wait_for(state="detached")
    assert page.evaluate("window.opened") == "once"


def test_the_page_of_a_cluster_lists_its_sessions_and_connects_a_client(opened, night, server):
    page = opened()
    row(page, night).get_by_role("link", name=night).click()
    ids = {*store.read(night).sessions}
    page.locator("#sessions + table tbody tr").nth(1).wait_for()
    assert {text.split(",")[0].strip() for text in page.locator(".id").all_inner_texts()} == ids
    page.context.grant_permissions(["clipboard-read"])
    page.get_by_role("button", name="Copy").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    with eval(copied, {"Client": Client}) as client:
        assert client.submit(sum, [1, 2]).result() == 3


def test_the_dashboard_opens_in_a_new_tab_with_all_panes(opened, night):
    page = opened(f"clusters/{night}")
    with page.context.expect_page() as opening:
        page.get_by_role("link", name="Dashboard of night").click()
    tab = opening.value
    pane = Pane(tab)
    until(lambda: pane.drawn)
    with Client(f"cml://{night}") as client:
        client.gather(client.map(lambda n: sum(range(10**6)), range(50), pure=False))
        until(lambda: pane.coloured > 1000)
    assert tab.evaluate("window.opener") is None
    tab.get_by_role("link", name="Workers", exact=True).click()
    tab.wait_for_url("**/workers")
    tab.goto(tab.url.replace("/workers", "/info/main/workers.html"))
    tab.get_by_text(f"{night}-").first.wait_for()


def test_a_dashboard_cannot_reach_the_page_cookies_or_other_dashboards(opened, night, server):
    page = opened(f"clusters/{night}")
    page.locator("#dashboard summary").click()
    page.locator("#view iframe").wait_for()
    [pane] = [frame for frame in page.frames if frame.parent_frame]
    pane.wait_for_url(re.compile("^http"))
    assert urlsplit(pane.url).netloc != urlsplit(server.url).netloc
    refused = "attempt => { try { return String(attempt()) } catch (error) { return error.name } }"
    for attempt in ("document.cookie", "localStorage", "parent.document", "navigator.serviceWorker.register"):
        found = pane.evaluate(f"({refused})(() => {attempt})")
        assert found in ("SecurityError", "TypeError"), attempt
    fetched = "fetch({0!r}, {1}).then(response => response.type, error => error.name)"
    api = f"{page.home}api/clusters/{night}"
    for url in (api, page.home, pane.url):
        assert pane.evaluate(fetched.format(url, "{credentials: 'include'}")) == "TypeError"
    order = "{method: 'POST', mode: 'no-cors', credentials: 'include', body: '{\"n\": 0}'}"
    assert pane.evaluate(fetched.format(f"{api}/scale", order)) == "opaque"
    assert server.clusters[night]["n_workers"] == 1


def test_in_a_cml_session_the_page_draws_dashboards_from_the_second_port(
    chrome, shared_platform, tmp_path, night
):
    headers = {"REMOTE-USER": "ann", "REMOTE-USER-PERM": "RW"}
    with PageServer(tmp_path, "application") as application:
        rule = f"--host-resolver-rules=MAP *.ml.test 127.0.0.1:{application.dashboard_port}"
        options = {"executable_path": chromium(), "args": ["--no-sandbox", rule]}
        browser = chrome.browser_type.launch(**options, timeout=PATIENCE * 1000)
        try:
            page = browser.new_page(extra_http_headers=headers)
            page.set_default_timeout(PATIENCE * 1000)
            page.goto(f"{application.url}clusters/{night}")
            page.locator("#dashboard summary").click()
            assert (
                page.locator("#view iframe")
                .get_attribute("src")
                .startswith("//read-only-application.ml.test/")
            )
            pane = Pane(page.frame_locator("#view iframe"))
            until(lambda: pane.drawn)
        finally:
            browser.close()


def test_the_page_follows_logs_and_keeps_those_of_ended_sessions(opened, night, server):
    page = opened(f"clusters/{night}")
    page.get_by_role("button", name=f"Log of {night}-0").click()
    log = page.locator("#log-text")
    log.filter(has_text="distributed.worker").wait_for()
    with Client(f"cml://{night}") as client:
        client.run(print, "a line that was not there before", flush=True)
    log.filter(has_text="a line that was not there before").wait_for()
    first = page.locator("#log").input_value()
    assert server.ask("POST", f"api/clusters/{night}/scale", {"n": 0})[0] == 200
    page.locator("#log option", has_text=f"{first} (ended)").wait_for(state="attached")
    assert "a line that was not there before" in log.inner_text()
    assert server.ask("POST", f"api/clusters/{night}/scale", {"n": 1})[0] == 200
    server.until_runs(night, 1)


def test_the_page_shows_a_lost_connection_and_reconnects(opened, shared_platform, tmp_path):
    with PageServer(tmp_path, "application") as lonely:
        page = opened(server=lonely, extra_http_headers={"REMOTE-USER": "ann", "REMOTE-USER-PERM": "RW"})
        page.get_by_role("heading", name="Clusters").wait_for()
        port = int(lonely.url.rstrip("/").rpartition(":")[2])
    page.locator("#connection", has_text="Connection lost").wait_for()
    again = PageServer(tmp_path, "application2", {"CDSW_APP_PORT": str(port)})
    with again:
        page.locator("#connection").wait_for(state="hidden")


def test_a_group_adapts_until_it_is_stopped(opened, night, server, until):
    page = opened(f"clusters/{night}")
    page.get_by_role("button", name="Scale… the group default").click()
    page.get_by_label("From").fill("1")
    page.get_by_label("to", exact=True).fill("0")
    page.get_by_role("button", name="Adapt", exact=True).click()
    refusal = page.get_by_role("alert").filter(has_text="invalid")
    refusal.wait_for()
    for _ in range(2):  # refreshes of the page, after which it shows the first one
        with page.expect_response(page.url):
            pass
    assert refusal.is_visible()
    page.get_by_label("to", exact=True).fill("2")
    page.get_by_role("button", name="Adapt", exact=True).click()
    adapts = page.locator("#group-default", has_text="adapts, 1 to 2")
    adapts.wait_for()
    page.get_by_role("button", name="Scale… the group default").click()
    page.get_by_role("button", name="Stop adapting").click()
    adapts.wait_for(state="detached")
    until(lambda: server.clusters[night]["groups"][0]["adapts"] is None)
    server.until_runs(night, 1)


def test_a_refused_form_shows_the_reason_and_can_be_corrected(opened, server, shared_platform):
    page = opened("new")
    before = len(shared_platform.sessions())
    page.get_by_label("Name name").fill("created")
    page.locator("summary", has_text="The scheduler's session").click()
    page.get_by_label("Scheduler CPUs").fill("-1")
    page.locator("summary", has_text="The scheduler's session").click()
    page.get_by_role("button", name="Create").click()
    page.get_by_role("alert").filter(has_text="invalid scheduler_cpu=-1: expected a number").wait_for()
    assert page.evaluate("document.activeElement.name") == "scheduler_cpu"
    assert page.get_by_label("Name name").input_value() == "created"
    assert len(shared_platform.sessions()) == before
    page.get_by_label("Scheduler CPUs").fill("")
    shared_platform.configure(quota={"sessions": 0})
    try:
        page.get_by_role("button", name="Create").click()
        page.get_by_text("the quota is exceeded").first.wait_for()
    finally:
        shared_platform.configure(quota=None)
    if not page.url.endswith("/new"):  # on a busy machine the form does not wait for the refusal
        assert server.ask("DELETE", "api/clusters/created")[0] == 200
        page.goto(f"{page.home}new")
        page.get_by_label("Name name").fill("created")
    shared_platform.configure(quota={"sessions": 0}, over_quota="wait")  # longer than the form waits
    page.get_by_label("Worker sessions").fill("1")
    page.locator("summary", has_text="Every session").click()
    page.get_by_label("Environment variables").fill("GREETING=hello there\nEMPTY=")
    page.get_by_role("button", name="Create").click()
    page.wait_for_url("**/clusters/created")
    page.locator(".status", has_text="starting").first.wait_for()
    shared_platform.configure(quota=None, over_quota="refuse")
    page.locator("#dashboard summary").click()  # it comes when the cluster runs
    page.locator("#view iframe").wait_for()
    has_workers(page, 1)
    server.until_runs("created", 1)
    with Client("cml://created") as client:
        greeting = client.submit(lambda: __import__("os").environ["GREETING"]).result()
    assert greeting == "hello there"
    assert "hello" not in page.content()
    assert server.ask("DELETE", "api/clusters/created")[0] == 200


def test_the_page_works_with_the_keyboard_alone(opened, server):
    page = opened()

    def press_tab_until(locator):
        """Move the focus with Tab to an element, and check that the focus is visible."""
        element = locator.element_handle()
        for _ in range(60):
            page.keyboard.press("Tab")
            if element.evaluate("element => element === document.activeElement"):
                assert element.evaluate("element => getComputedStyle(element).outlineStyle") != "none"
                return
        raise AssertionError("the focus does not come to it")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    press_tab_until(page.get_by_role("link", name="New cluster"))
    page.keyboard.press("Enter")
    page.wait_for_url("**/new")
    press_tab_until(page.get_by_label("Name name"))
    page.keyboard.type("typed")
    page.keyboard.press("Enter")
    page.wait_for_url("**/clusters/typed")
    server.until_runs("typed", 0)
    scale = page.get_by_role("button", name="Scale… the group default")
    scale.wait_for()
    press_tab_until(scale)
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.name") == "n"
    page.keyboard.press("Control+A")
    page.keyboard.type("1")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for(state="detached")
    assert scale.evaluate("element => element === document.activeElement")
    has_workers(page, 1)
    press_tab_until(page.locator("#logs summary"))
    page.keyboard.press("Enter")
    press_tab_until(page.locator("#log-text"))
    page.locator("#log-text", has_text="Scheduler at").wait_for()
    page.reload()
    press_tab_until(page.get_by_role("button", name="Delete…"))
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.innerText") == "Cancel"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url(page.home)
    until(lambda: "typed" not in server.clusters)
