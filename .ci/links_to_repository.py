"""A hook of mkdocs: links of a page to files outside of docs/ lead to the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Return the page with ``../FILE`` in links as the file's address on the forge."""
    return re.sub(r"\]\(\.\./([^)]+)\)", rf"]({config.repo_url}/blob/main/\1)", markdown)
