"""The documentation site: Sphinx over the Markdown pages of this folder. `make docs` builds it."""

import re
from typing import Any

import anybatch as ab

project = "anybatch"
copyright = "the anybatch authors"
version = release = ab.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
templates_path = ["_templates"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # pages link to headings as GitHub names them

add_module_names = False
smartquotes = False
autodoc_typehints = "none"  # the docstrings say types, shapes and units
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # `options=DEFAULT`, not all ten of them
autosummary_generate = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
nitpick_ignore_regex = [
    ("py:.*", r"(?!anybatch\.(core\.errors\.)?\w+$).*")
]  # no inventory of torch or Python is fetched

html_theme = "pydata_sphinx_theme"
html_title = "anybatch"
html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}
html_theme_options = {
    "header_links_before_dropdown": 7,
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


def _as_rst(app: object, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    """Turn the single backticks of docstrings into code, and public names among them into links."""

    def replaced(found: re.Match[str]) -> str:
        code, after = found[1], "\\ " if found[2] else ""
        public = re.fullmatch(r"(?:ab|anybatch)\.(\w+)", code)
        if public and public[1] in ab.__all__ and public[1] != "errors":
            place = "anybatch.core.errors" if hasattr(ab.errors, public[1]) else "anybatch"
            return f":py:obj:`{code} <{place}.{public[1]}>`{after}"
        return f"``{code}``{after}"

    text = "\n".join(lines)
    lines[:] = re.sub(r"(?<![`:])`([^`]+)`(?!`)(?=(\w)?)", replaced, text).split("\n")


def _with_files(app: object, name: str, source: list[str]) -> None:
    """Copy files that stand beside this folder, such as reports of measurements, into the site."""
    source[0] = re.sub(r"\[([^]]+)\]\((\.\./[^)]+)\)", r"{download}`\1 <\2>`", source[0])


def setup(app: Any) -> None:
    """Connect the conversions of docstrings and pages."""
    app.connect("source-read", _with_files)
    app.connect("autodoc-process-docstring", _as_rst)
