"""How Sphinx builds the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.addnodes import download_reference, pending_xref
from sphinx.transforms import SphinxTransform

import aiockpt

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

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
    (r"py:class", r"aiockpt\.runtime\.secrets\.Token"),  # a text that hides itself
    (r"py:class", r"ObjectStore"),  # of obstore
    (r"py:class", r"ProcessGroup"),  # torch's
    (r"py:class", r"aiockpt\.checkpointers\.config\.GroupStore"),  # for the writers
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3


class LinksOutOfDocs(SphinxTransform):
    """Offer a file outside of this directory as a download, where a page links to it.

    In a repository, such a link leads to the file. Sphinx would look for a page.
    """

    default_priority = 500

    def apply(self) -> None:
        """Replace the links of one page."""
        for link in [*self.document.findall(pending_xref)]:
            name = link["reftarget"].partition("#")[0]
            file = ROOT / (f"{name}.md" if link["refdomain"] == "doc" else name)
            if link["reftype"] == "myst" and file.is_file():
                path = file.relative_to(ROOT).as_posix()
                link.replace_self(
                    download_reference(
                        "",
                        *link.children,
                        refdoc=link["refdoc"],
                        reftarget=f"/../{path}",
                        reftype="myst",
                        refexplicit=True,
                    )
                )


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.add_transform(LinksOutOfDocs)
    app.connect("autodoc-process-signature", shorten_defaults)


def shorten_defaults(*event: Any) -> tuple[str | None, str | None]:
    """Show the defaults of options as a program would write them."""
    signature, returned = event[-2:]
    if signature:
        nested = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
        signature = re.sub(
            rf"= ((?:Server|Auth|Receive|Limits)){nested}", r"= \1()", signature
        )
        signature = re.sub(r"(\w+Config) = <factory>", r"\1 = \1()", signature)
        signature = signature.replace("= <factory>", "= {}")
        signature = re.sub(r"(?<=connections: int = )\d+", "min(4, cores)", signature)
        signature = re.sub(r"(?<== )\d{5,}", _number, signature)
    return signature, returned


def _number(match: re.Match[str]) -> str:
    number = int(match[0])
    return f"{number:_}" if number % (1 << 20) else f"{number >> 20} << 20"
