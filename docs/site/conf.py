"""How Sphinx makes the site of docs/: see build.py."""

project = "Tidegate"
author = "the authors of Tidegate"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
nitpicky = True

myst_heading_anchors = 6  # the anchors that GitHub makes, which the pages use
myst_enable_extensions = ["html_admonition"]
suppress_warnings = [
    "misc.highlighting_failure",  # a command that is continued in the next lines of its output
]

html_theme = "furo"
html_title = "Tidegate"
html_favicon = "../../gateway/web/static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["reference.js"]
templates_path = ["templates"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
