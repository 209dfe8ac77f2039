"""The page in a real browser: charts, gallery, filters, tokens, decisions and the file that they are saved to."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from everytoken_lab.cli import main
from everytoken_lab.data.labels import parse_labels
from everytoken_lab.reports.page import render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here, so the report's page was not opened (Debian: apt install chromium)"
)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=2000", "--enable-logging=stderr", "--v=0",
]  # fmt: skip


PICTURE = "data:image/gif;base64,R0lGODlhAQABAIAAAAUEBAAAACwAAAAAAQABAAACAkQBADs="


def ask(page: Path, folder: Path, script: str, width: int = 1280) -> dict:
    """What a script finds on a page: `said` is an object that it fills, perhaps later."""
    copy = folder / "asked.html"
    tell = "document.documentElement.dataset.said = JSON.stringify(said);"
    script = f"<script>(async () => {{ const said = {{}}; {script}; {tell} }})();</script></body>"
    copy.write_text(page.read_text().replace("</body>", script))
    call = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([*call, copy.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    dom = done.stdout
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', dom[: dom.index(">", dom.index("<html"))]))
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []  # what the page complains about
    assert "errors" not in found
    return json.loads(html.unescape(found.pop("said", "{}"))) | {"page": found}


@pytest.fixture(scope="module")
def page(trained, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(trained / "runs"), "--out", str(out), "--samples", "4"]) == 0
    return out


@pytest.mark.parametrize("width", [500, 1280])
def test_every_chart_is_drawn_without_errors_and_nothing_is_wider_than_the_window(page, tmp_path, width):
    found = ask(
        page, tmp_path, "said.broken = [...document.images].filter((i) => i.complete && !i.naturalWidth).length", width
    )
    assert int(found["page"]["charts"]) >= 10
    assert found["page"]["drawn"] == found["page"]["charts"]
    assert found["page"]["wide"] == "false"
    assert found["broken"] == 0


def test_the_arrow_keys_read_values_of_a_chart_aloud(page, tmp_path):
    script = """
      const chart = document.querySelector(".chart svg"), live = document.getElementById("live");
      const press = (key) => chart.dispatchEvent(new KeyboardEvent("keydown", { key }));
      chart.focus();
      press("Home"); said.first = live.textContent;
      press("ArrowRight"); said.second = live.textContent;"""
    found = ask(page, tmp_path, script)
    assert found["first"].startswith("epoch 1")
    assert found["second"].startswith("epoch 2")
    assert "plain-seed1" in found["second"]


def photo(number: int, label: int, *tops: int, **more) -> dict:
    """A photo with an answer of each run; the first of 2 x 3 tokens is of class 1, and the mask is the left half."""
    answers = [{"top": [top], "right": top == label, "doubt": number, "sure": 1 / (1 + number)} for top in tops]
    tokens = {"columns": 3, "top": [1, 0, 0, 0, 0, 2], "percent": [91, 50, 50, 50, 50, 70], "source": "token head"}
    tokens |= {"area": [0, 0, 1, 1], "names": {"0": "ants", "1": "bees", "2": "a wasp, far away"}}
    answers[0] |= {"tokens": tokens, "mask": [0, *[48, 48] * 96][:-1], "times": 7.31, "p": 0.88}
    return {"key": f"{number:04}.jpg", "split": "", "size": [30, 20], "picture": PICTURE, "label": [label],
            "answers": answers} | more  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def make(photos: list[dict], runs: int = 1, **labelling) -> Path:
        file = tmp_path / "gallery.html"
        confusion = [[label, answer, 1] for label in range(3) for answer in range(3)]
        numbers = [{"class": f"class {i}", "images": 3, "recall": 50.0, "precision": 40.0} for i in range(3)]
        model = {"confidence": "", "seen": False, "images": 9, "wrong": 6, "classes": numbers, "confusion": confusion}
        names = ["ant", "=bee", 'wasp, "yellow"']
        facts = {
            "headline": "one: top-1 33 %", "details": [], "metric": "top-1", "bases": [], "groups": [], "settings": [],
            "runs": [], "comparisons": [], "classes": ["ants", "bees", "wasps"], "photos": photos, "notes": [],
            "models": [{**model, "name": f"run {i}"} for i in range(runs)], "skipped": {},
            "labelling": {"data": "photos", "names": names, "multi_label": False, **labelling},
        }  # fmt: skip
        file.write_text(render("Gallery", facts))
        return file

    return make


SHOWN = 'const shown = () => [...document.querySelectorAll(".card .file")].map((one) => one.textContent);'


def test_photos_are_filtered_sorted_and_compared_between_runs(write, tmp_path):
    page = write([photo(0, 0, 1, 0), photo(1, 0, 0, 2), photo(2, 1, 2, 2), photo(3, 1, 1, 1), photo(4, 0, 1, 1)], 2)
    script = """
      const set = (place, value) => {
        const menu = document.querySelectorAll("#filters select")[place];
        menu.value = value;
        menu.dispatchEvent(new Event("change"));
        return shown();
      };
      said.first = shown();
      for (const which of ["wrong-0", "better-1", "worse-1", "all-wrong", "right"]) said[which] = set(0, which);
      set(0, "mistakes");
      said.label = set(1, "1");
      set(1, ""); said.answer = set(2, "1");
      set(2, ""); said.surest = set(3, "sure");
      document.querySelector('#filters input[type="search"]').value = "0004";
      document.querySelector('#filters input[type="search"]').dispatchEvent(new Event("input"));
      said.file = shown();
      document.querySelectorAll(".matrix button")[0].click();
      said.pair = shown();
      said.count = document.getElementById("count").textContent;"""
    found = ask(page, tmp_path, SHOWN + script)
    assert found["first"] == ["0004.jpg", "0002.jpg", "0001.jpg", "0000.jpg"]
    assert found["wrong-0"] == ["0004.jpg", "0002.jpg", "0000.jpg"]
    assert found["better-1"] == ["0000.jpg"]
    assert found["worse-1"] == ["0001.jpg"]
    assert found["all-wrong"] == ["0004.jpg", "0002.jpg"]
    assert found["right"] == ["0003.jpg"]
    assert found["label"] == ["0002.jpg"]
    assert found["answer"] == ["0004.jpg", "0000.jpg"]
    assert found["surest"] == ["0000.jpg", "0001.jpg", "0002.jpg", "0004.jpg"]
    assert found["file"] == ["0004.jpg"]
    assert found["pair"] == ["0000.jpg", "0004.jpg"]  # the surest first, as was chosen
    assert found["count"] == "2 photos"


def test_a_photo_is_enlarged_its_tokens_are_read_and_the_mask_is_switched_off(write, tmp_path):
    script = """
      const one = (query) => document.querySelector(query), token = () => one("#token").textContent;
      const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
      one(".card .open").click();
      said.open = one("#viewer").open;
      said.title = one("#viewer-title").textContent;
      said.masks = document.querySelectorAll("#stage .mask").length;
      one('#viewer-look [data-look="mask"]').click();
      said.without = document.querySelectorAll(".mask").length;
      one('#viewer-look [data-look="tokens"]').click();
      said.cells = document.querySelectorAll("#stage .tokens rect").length;
      said.legend = one("#legend").textContent;
      const frame = one("#stage .photo"), box = frame.getBoundingClientRect();
      const at = (x, y) => frame.dispatchEvent(new PointerEvent("pointermove",
        { clientX: box.left + x * box.width, clientY: box.top + y * box.height }));
      at(0.1, 0.1); said.hovered = token();
      at(0.9, 0.9); said.last = token();
      press(frame, "ArrowUp"); said.above = token();
      said.same = one("#viewer-title").textContent;
      press(one("#close"), "ArrowRight"); said.next = one("#viewer-title").textContent;
      press(one("#close"), "d"); said.pressed = one('#decision [aria-pressed="true"]').textContent;
      one("#close").click();
      await new Promise((done) => setTimeout(done, 50));
      said.focused = document.activeElement.closest(".card").querySelector(".file").textContent;"""
    found = ask(write([photo(number, 0, 1) for number in range(3)]), tmp_path, script)
    assert found["open"] is True
    assert found["title"] == "0002.jpg (1 of 3)"
    assert (found["masks"], found["without"]) == (1, 0)
    assert found["cells"] == 6
    assert "ants 67 %" in found["legend"]
    assert found["hovered"] == "bees, 91 % (token in row 1, column 1)"
    assert found["last"] == "a wasp, far away, 70 % (token in row 2, column 3)"
    assert found["above"] == "ants, 50 % (token in row 1, column 3)"
    assert found["same"] == found["title"]  # the arrow keys read tokens where a photo has the focus
    assert found["next"] == "0001.jpg (2 of 3)"
    assert found["pressed"] == "Drop"
    assert found["focused"] == "0001.jpg"


def saved(page: Path, folder: Path, script: str) -> tuple[str, dict]:
    """The file that the button saves after a script."""
    script = f"""
      let blob = null;
      URL.createObjectURL = (given) => {{ blob = given; return "#"; }};
      const card = (name) => [...document.querySelectorAll(".card")].find((one) => one.textContent.includes(name));
      const choose = (name, kind) => card(name).querySelector(`button[data-kind="${{kind}}"]`).click();
      {script}
      document.getElementById("save").click();
      said.file = blob ? await blob.text() : "";
      said.told = document.getElementById("decided").textContent;"""
    found = ask(page, folder, script)
    return found["file"], found


def test_decisions_are_saved_as_corrections_that_training_reads(write, tmp_path):
    photos = [photo(0, 0, 1), photo(1, 0, 2), photo(2, 1, 0), photo(3, 1, 2), photo(4, 2, 0, key='+odd, "name".jpg')]
    script = """
      choose("0000", "change"); choose("0001", "change"); choose("0002", "drop"); choose("0003", "keep");
      choose("odd", "drop");
      choose("0002", "change"); choose("0002", "change");"""
    text, found = saved(write(photos, earlier=[["old.jpg", "ant", ""], ["0000.jpg", "ant", ""]]), tmp_path, script)
    assert found["told"] == "2 to change, 1 to leave out, 1 fine as they are"
    table = tmp_path / "corrections.csv"
    table.write_text(text)
    rows = [(row.path, row.labels) for row in parse_labels(table, corrections=True)]
    assert rows == [
        ("old.jpg", ("ant",)), ("0000.jpg", ("=bee",)), ("0001.jpg", ('wasp, "yellow"',)), ('+odd, "name".jpg', ()),
    ]  # fmt: skip


def test_where_one_row_needs_a_split_all_rows_have_one(write, tmp_path):
    page = write(
        [photo(0, 0, 1, split="val"), photo(1, 0, 2, split="val")], earlier=[["0001.jpg", "ant", ""], ["a.jpg", "", ""]]
    )
    text, _ = saved(page, tmp_path, 'choose("0001", "drop");')
    assert text.splitlines() == ["path,label,split", "a.jpg,,train", "a.jpg,,val", "0001.jpg,,val"]


def test_a_label_that_is_no_class_is_refused_and_another_is_taken(write, tmp_path):
    script = """
      document.querySelector(".card .open").click();
      const input = document.querySelector("#decision input");
      const type = (text) => { input.value = text; input.dispatchEvent(new Event("change")); };
      type("moth"); said.refused = input.validationMessage;
      said.none = document.getElementById("save").disabled;
      type("ant");"""
    text, found = saved(write([photo(0, 1, 2)]), tmp_path, script)
    assert found["refused"] == "No class is moth."
    assert found["none"] is True
    assert text == "path,label\n0000.jpg,ant\n"


def test_decisions_survive_a_reload_but_not_a_label_that_has_changed(write, tmp_path):
    tell = 'said.told = document.getElementById("decided").textContent;'
    saved(write([photo(0, 0, 1), photo(1, 0, 2)]), tmp_path, 'choose("0001", "drop"); choose("0000", "change");')
    found = ask(write([photo(0, 0, 1), photo(1, 0, 2)]), tmp_path, tell)
    assert found["told"] == "1 to change, 1 to leave out, 0 fine as they are"
    found = ask(write([photo(0, 1, 2), photo(1, 0, 2)]), tmp_path, tell)
    assert found["told"] == "0 to change, 1 to leave out, 0 fine as they are"


def test_what_is_suggested_is_a_wrong_answer_and_where_there_is_none_a_class_is_typed(write, tmp_path):
    script = """
      const change = (name) => card(name).querySelector('button[data-kind="change"]');
      said.suggested = change("0000").textContent;
      const menu = document.querySelector("#filters select");
      menu.value = "all";
      menu.dispatchEvent(new Event("change"));
      said.none = change("0001").textContent;
      change("0001").click();
      const input = document.querySelector("#decision input");
      said.typing = document.activeElement === input;
      input.value = "=bee";
      input.dispatchEvent(new Event("change"));"""
    text, found = saved(write([photo(0, 0, 0, 2), photo(1, 0, 0, 0)], 2), tmp_path, script)
    assert found["suggested"] == 'Change to wasp, "yellow"'
    assert found["none"] == "Change …"
    assert found["typing"] is True
    assert text == "path,label\n0001.jpg,'=bee\n"


def test_with_2000_photos_only_the_first_cards_are_made_and_others_when_they_are_asked_for(write, tmp_path):
    script = """
      said.cards = document.querySelectorAll(".card").length;
      document.getElementById("more").click();
      said.more = document.querySelectorAll(".card").length;
      said.count = document.getElementById("count").textContent;"""
    found = ask(write([photo(number, 0, 1) for number in range(2000)]), tmp_path, script)
    assert found["cards"] == 60
    assert 120 <= found["more"] < 400
    assert found["count"] == "2,000 photos"


def test_everything_that_can_be_used_has_a_name_for_screen_readers(page, tmp_path):
    script = """
      document.querySelector(".card .open").click();
      const name = (one) => one.getAttribute("aria-label") || one.labels?.[0]?.textContent || one.textContent.trim()
        || one.querySelector("img")?.alt;
      said.nameless = [...document.querySelectorAll("button, select, input, [tabindex], img, dialog, section")]
        .filter((one) => !(name(one) || one.alt || byId(one.getAttribute("aria-labelledby"))?.textContent))
        .map((one) => one.outerHTML.slice(0, 120));
      said.looked = document.querySelectorAll("button, select, input").length;"""
    found = ask(page, tmp_path, script)
    assert found["nameless"] == []
    assert found["looked"] > 20
