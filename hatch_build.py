"""What a package index shows: addresses of the project, and the README with links that lead somewhere from there.

All begin with the address of the repository, which pyproject.toml has (`[tool.hatch.metadata.hooks.custom]`).
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {
    "Repository": "",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}


class Addresses(MetadataHookInterface):
    """The dynamic fields `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the two fields."""
        address = self.config["repository"].rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)", rf"\1{address}/raw/main/", text)
        text = re.sub(r"(\]\()(?!\w+:|#)", rf"\1{address}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {name: f"{address}{page}" for name, page in PAGES.items()}
