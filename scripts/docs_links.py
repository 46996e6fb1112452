"""A hook of mkdocs: links from documents to files of the checkout outside of `docs/` become text that names the file.

A link to a file that does not exist stays, so that the strict build refuses it.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """What mkdocs calls for every page, before it makes HTML of it."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if not target.exists() or target.is_relative_to(ROOT / "docs"):
            return link[0]
        return f"{link[1]} (`{target.relative_to(ROOT)}`)"

    return OUTSIDE.sub(named, markdown)
