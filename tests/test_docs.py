"""The pages: every one can be reached from the navigation, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from everytoken.errors import PUBLISHED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
NAVIGATION = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.S)


def anchors(page: Path) -> set[str]:
    """Ids of headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    titles = re.findall(r"^#+ +(.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_navigation_once():
    listed = [line for block in NAVIGATION for line in block.splitlines() if line and not line.startswith(":")]
    own = [name for name in listed if not name.startswith("reference/")]
    pages = (page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*") if page.suffix in (".md", ".ipynb"))
    there = {page.as_posix() for page in pages if page.parts[0] != "reference"} - {"index"}
    assert sorted(own) == sorted(there)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files_and_headings_that_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z+]+:", target) or target.startswith("reference/"):  # made when the site is built
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_no_page_has_an_e_mail_address():
    for page in PAGES:
        found = re.findall(r"[\w.]+@[\w-]+\.[a-z]{2,}", page.read_text(encoding="utf-8"))
        assert not found, f"{page.name}: {found}"


def test_no_page_installs_a_name_that_is_not_published():
    if PUBLISHED:
        return
    for page in PAGES:
        assert not re.search(r"pip install [\"']?everytoken", page.read_text(encoding="utf-8")), page.name


def test_the_readme_is_one_screen():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 115
    assert [line for line in lines if len(line) > 88 and not line.startswith("|")] == []
