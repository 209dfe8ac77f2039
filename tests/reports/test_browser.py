"""The page in a real browser: no errors, every chart drawn, no network, on a phone and a desk, light and dark."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from everytoken_lab.cli import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here, so the report's page was not opened (Debian: apt install chromium)"
)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=2000", "--enable-logging=stderr", "--v=0",
]  # fmt: skip


def browse(page: Path, profile: Path, *flags: str) -> tuple[str, str]:
    """(what it prints, what it logs) for one look at a page."""
    call = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def complaints(log: str) -> list[str]:
    """Lines that the page itself wrote to the console."""
    return [line for line in log.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def page(trained, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(trained / "runs"), "--out", str(out), "--samples", "4"]) == 0
    return out


@pytest.mark.parametrize("width", [390, 1280])
def test_every_chart_is_drawn_without_errors_and_nothing_is_wider_than_the_window(page, tmp_path, width):
    text, log = browse(page, tmp_path, f"--window-size={width},900", "--dump-dom")
    said = dict(re.findall(r'data-(\w+)="([^"]*)"', text[: text.index(">", text.index("<html"))]))
    assert complaints(log) == []
    assert "errors" not in said
    assert int(said["charts"]) >= 10
    assert said["drawn"] == said["charts"]
    assert said["images"] == "0"  # pictures that did not load
    assert said["wide"] == "false"


def test_the_check_of_itself_sees_a_blank_chart_an_error_and_a_missing_picture(page, tmp_path):
    text = page.read_text()
    broken = tmp_path / "broken.html"
    text = text.replace('class="line mark"', 'class="line mark" visibility="hidden"').replace(
        'class="dots mark"', 'class="dots mark" visibility="hidden"'
    )
    text = text.replace('src="data:image/png;base64,', 'src="data:image/png;base64,AAAA', 1)
    broken.write_text(text.replace("</body>", "<script>throw new Error('planted')</script></body>"))
    dom, log = browse(broken, tmp_path / "profile", "--dump-dom")
    said = dict(re.findall(r'data-(\w+)="([^"]*)"', dom[: dom.index(">", dom.index("<html"))]))
    assert "planted" in said["errors"]
    assert len(complaints(log)) == 1
    assert int(said["drawn"]) < int(said["charts"])
    assert said["images"] == "1"


@pytest.mark.parametrize("size", [(390, 2400), (1280, 2000)])
def test_screenshots_are_not_blank_in_light_and_dark(page, tmp_path, size):
    means = {}
    for scheme in ("light", "dark"):
        # headless Chromium takes the scheme of the system; forcing it in the page's own words is the same to the page
        copy = tmp_path / f"{scheme}.html"
        text = page.read_text().replace("(prefers-color-scheme: dark)", "all" if scheme == "dark" else "not all")
        copy.write_text(text.replace("screen and all", "all").replace("screen and not all", "not all"))
        file = tmp_path / f"{scheme}.png"
        browse(copy, tmp_path / scheme, f"--window-size={size[0]},{size[1]}", f"--screenshot={file}")
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB"), np.int16)
        assert pixels.shape[1] == size[0]
        means[scheme] = pixels.mean()
        for band in np.array_split(pixels, 6):  # words, charts or tables everywhere
            assert band.std() > 3
        colourful = (pixels.max(2) - pixels.min(2) > 60).mean()
        assert colourful > 0.001
    assert means["light"] > 200
    assert means["dark"] < 70


def test_the_arrow_keys_read_values_aloud(page, tmp_path):
    script = """<script>
      const chart = document.querySelector("svg[data-chart]");
      chart.focus();
      chart.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
      document.documentElement.dataset.first = document.getElementById("live").textContent;
      chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      document.documentElement.dataset.second = document.getElementById("live").textContent;
    </script></body>"""
    copy = tmp_path / "keys.html"
    copy.write_text(page.read_text().replace("</body>", script))
    dom, log = browse(copy, tmp_path / "profile", "--dump-dom")
    said = dict(re.findall(r'data-(\w+)="([^"]*)"', dom[: dom.index(">", dom.index("<html"))]))
    assert complaints(log) == []
    assert said["first"].startswith("epoch 1")
    assert said["second"].startswith("epoch 2")
    assert "plain-seed1" in said["second"]
