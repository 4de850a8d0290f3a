"""How docstrings are read for the site: `Example:` is a section of examples."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)Example:$", re.M)


class Examples(griffe.Extension):
    """Names the section as griffe knows it, so that its lines are shown as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
