"""A report in a real browser: light, dark, wide and as narrow as a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from federations import federation, network, plan
from metabayfl.api import run_job
from metabayfl.methods import FedAvg, MetaBayFL
from metabayfl.report.page import render
from metabayfl.report.runs import read_runs

CHROMIUM = shutil.which("chromium")
DARK = "--blink-settings=preferredColorScheme=0"
WIDTHS = (390, 1280)
MEASURE = """
<script>
addEventListener("load", () => {
  const measured = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const outside = [...page.querySelectorAll("h1, h2, p, figure, figure > svg, li, .scroll, details")]
      .filter(e => e.getBoundingClientRect().right > root.clientWidth + 1).map(e => e.outerHTML.slice(0, 80));
    const drawings = [...page.querySelectorAll("figure > svg")].map(e => e.getBoundingClientRect());
    return {
      width: root.clientWidth, needed: root.scrollWidth, outside,
      figures: drawings.filter(box => box.width > 150 && box.height > 80).length,
      requests: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name),
      paper: getComputedStyle(page.body).backgroundColor, ink: getComputedStyle(page.querySelector("text")).fill,
      font: parseFloat(getComputedStyle(page.querySelector("figure text")).fontSize)
        * drawings[0].width / page.querySelector("figure > svg").viewBox.baseVal.width,
    };
  });
  document.body.innerHTML = "<pre id=measured></pre>";
  document.getElementById("measured").textContent = JSON.stringify(measured);
});
</script>
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("runs")
    for method in (FedAvg(epochs=1), MetaBayFL(epochs=1)):
        for seed in (0, 1):
            run_job(network(), federation(), method, plan(seed=seed), out=where / f"{method.name}-{seed}")
    return render(read_runs(sorted(where.iterdir())))


def browse(scratch: Path, page: str, *options: str) -> tuple[str, str]:
    """Open a page; returns what the browser printed and what it logged."""
    file = scratch / "page.html"
    file.write_text(page, encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--disable-background-networking",
        f"--user-data-dir={scratch / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=5000",
        *options, file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overflows_and_every_figure_is_drawn(report: str, tmp_path: Path, dark: bool) -> None:
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(report)}"></iframe>'
        for width in WIDTHS
    )
    dom, log = browse(tmp_path, f"<!DOCTYPE html><body>{frames}{MEASURE}", "--dump-dom", *([DARK] if dark else []))
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
    assert found, log
    for width, measured in zip(WIDTHS, json.loads(html.unescape(found[1])), strict=True):
        assert measured["width"] == width
        assert measured["needed"] <= width, measured["outside"]
        assert measured["outside"] == measured["requests"] == []
        assert measured["figures"] == report.count("<figure>") == 6 + 2 + 2 + 1 + 1 + 1
        assert measured["font"] >= 9.5
        paper, ink = (sum(map(int, re.findall(r"\d+", measured[name])[:3])) / 3 for name in ("paper", "ink"))
        assert (paper < 60 and ink > 200) if dark else (paper > 240 and ink < 60)
    assert "CONSOLE" not in log


@pytest.mark.parametrize("dark", [False, True])
def test_a_screenshot_has_paper_and_ink(report: str, tmp_path: Path, dark: bool) -> None:
    shot = tmp_path / "shot.png"
    _, log = browse(tmp_path, report, f"--screenshot={shot}", "--window-size=1280,2000", *([DARK] if dark else []))
    assert "CONSOLE" not in log
    with Image.open(shot) as image:
        colours = image.convert("RGB").getcolors(1 << 24) or []
    _, paper = max(colours)
    assert (max(paper) < 60) if dark else (min(paper) > 240)
    assert len(colours) > 100


def test_the_page_forbids_itself_to_load_or_run_anything(report: str, tmp_path: Path) -> None:
    hostile = '<script>document.title = "it ran"</script><img src="picture.png"></body>'
    dom, log = browse(tmp_path, report.replace("</body>", hostile), "--dump-dom")
    assert "<title>it ran" not in dom
    refused = [line for line in log.splitlines() if "CONSOLE" in line]
    assert len(refused) == 2
    assert all("Content Security Policy" in line for line in refused)
