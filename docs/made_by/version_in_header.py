"""A hook of MkDocs: the header of every page shows the version that the pages are about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

INIT = Path(__file__).resolve().parents[2] / "torch_sink" / "__init__.py"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """MkDocs calls it before it reads the pages."""
    found = re.search(r'^__version__ = "(.+)"', INIT.read_text(), flags=re.MULTILINE)
    assert found is not None
    config.site_name = f"{config.site_name} {found[1]}"
    return config
