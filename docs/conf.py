"""How the pages become a manual: `make docs` fails on any warning, and `make look` measures the pages in a browser."""

import rdmanet

project = "rdmanet"
author = "the rdmanet authors"
copyright = author
version = release = rdmanet.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"rdmanet {version}"
html_static_path = ["_static"]
html_css_files = ["rdmanet.css"]
exclude_patterns = ["_build"]

# Headings are link targets, as on the pages' other reader, a repository browser.
myst_heading_anchors = 3

# The compiled classes carry their signatures as the first line of the docstring.
autodoc_docstring_signature = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
