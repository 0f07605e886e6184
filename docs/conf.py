"""How Sphinx builds the documentation."""

from __future__ import annotations

import aiockpt

project = "aiockpt"
author = "The aiockpt authors"
project_copyright = "The aiockpt authors"
release = version = aiockpt.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"aiockpt {release}"
nitpicky = True
# References to these packages would need their inventories, and so the network.
nitpick_ignore_regex = [
    (
        r"py:.*",
        (
            r"(_?asyncio|aiohttp|collections|contextlib|datetime|dist|logging|msgspec|os"
            r"|pathlib|ssl|socket|subprocess|torch|typing|web|CollectorRegistry)(\..*)?"
        ),
    ),
    (r"py:(class|obj)", r"(aiockpt\..*\.)?[BCMT]"),  # type variables
    (r"py:class", r"aiockpt\.checkpointers\.writer\.Writers"),  # for the factories
    (r"py:class", r"aiockpt\.memory\.device\.Port"),  # for tests
    (r"py:class", r"ObjectStore"),  # of obstore
    (r"py:class", r"ProcessGroup"),  # torch's
    (r"py:class", r"aiockpt\.checkpointers\.config\.GroupStore"),  # for the writers
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
