"""The site: `make docs` builds it in build/site, with warnings as errors.

Pages are the Markdown files and the notebook in this folder, in the order of index.md. The reference is written when
the site is built (make_reference.py): from docstrings, the parsers of the commands and the headers of the recipes.
"""

import re
import sys
import tomllib
from importlib.metadata import version as installed
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import make_reference  # noqa: E402

PYPROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PYPROJECT["project"].get("urls", {}).get("Repository", "")
"""[project.urls] in pyproject.toml is its one place; without it, files outside this folder are named, not linked."""

project = "everytoken"
author = copyright = "The everytoken authors"
version = release = installed("everytoken")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["img/*.py", "stories/*.py"]
myst_heading_anchors = 4
nb_execution_mode = "off"
suppress_warnings = ["myst.strikethrough"]

html_theme = "furo"
html_title = f"everytoken {release}"
html_show_sourcelink = False
html_theme_options = (
    {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"} if REPOSITORY else {}
)
copybutton_exclude = ".linenos, .gp, .go"

default_role = "code"  # single backticks in docstrings are code, as in Markdown
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_use_ivar = True


def outside(source: str) -> str:
    """Links that leave this folder lead to the repository, or are plain words as long as its address is not known."""

    def link(found: re.Match[str]) -> str:
        text, path = found.groups()
        return f"[{text}]({REPOSITORY}/blob/main/{path})" if REPOSITORY else text

    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)\)", link, source)


def prepare_page(app, name: str, source: list[str]) -> None:
    source[0] = outside(source[0])


def setup(app) -> None:
    app.connect("builder-inited", lambda app: make_reference.write(HERE / "reference"))
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", make_reference.prepare_docstring, priority=400)  # before napoleon's 500
