"""The page in a browser: it renders, asks no network for anything, and logs no error."""

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime

import pytest

from megatron_trace.rl.html_report.page import page
from megatron_trace.rl.html_report.runs import find_runs

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium: apt-get install -y --no-install-recommends chromium",
)
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--enable-logging=stderr",
    # Nothing leaves the machine, whatever the browser's own services want.
    "--host-resolver-rules=MAP * ~NOTFOUND",
]


def browse(tmp_path, html):
    """Gives the document that it shows, its messages, and the addresses that the page asked for."""
    path, net_log = tmp_path / "page.html", tmp_path / "net.json"
    path.write_text(html)
    done = subprocess.run(
        [
            str(CHROMIUM),
            *FLAGS,
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--log-net-log={net_log}",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    events = json.loads(net_log.read_text())["events"]
    requests = [e["params"] for e in events if "initiator" in e.get("params", {})]
    # What the browser asks for by itself has no page as its origin.
    asked = {one["url"] for one in requests if one["initiator"] != "not an origin"}
    return done.stdout, done.stderr, asked


@pytest.fixture
def html(every_state, exchange):
    """RL runs beside one of Megatron's loop."""
    runs = find_runs([every_state])
    return page(runs, title="Runs", made=datetime(2026, 11, 30, tzinfo=UTC))


def test_browser_shows_the_page_without_errors_or_requests(tmp_path, html):
    shown, messages, asked = browse(tmp_path, html)
    assert "CONSOLE" not in messages
    assert asked == set()
    assert "crashed after 1 of 2 steps" in shown
    assert "left off after 2 of 9 steps" in shown
    assert "Waiting for micro-batches" in shown
    assert "<polyline" in shown


def test_the_check_sees_an_error_and_a_request(tmp_path, html):
    bad = html.replace("<main>", '<main><img src="http://localhost:9/x.png">')
    _, messages, _ = browse(tmp_path, bad)
    assert "CONSOLE" in messages, "the page's policy refuses the image and says so"
    without_policy = re.sub(r"<meta http-equiv[^>]*>", "", bad)
    _, _, asked = browse(tmp_path, without_policy)
    assert "http://localhost:9/x.png" in asked
