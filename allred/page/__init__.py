"""The HTML page that shows a state of a job (monitor/state.py) or a timeline (timeline/show.py): page.html with a JSON
document in it. It is one file without dependencies, and loads nothing from elsewhere.

Text of the document is data: the page shows it as text only, and a policy in the page lets no other script run.
"""

import json
import secrets
from importlib import resources
from typing import Any

from allred.errors import InputError


def render(document: dict[str, Any] | None) -> str:
    """Return the page. document: shown at once; None: the page waits for the events of a server (monitor/web.py)."""
    data = json.dumps(document, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":  # nothing ends the script element, or begins a comment in it
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    template = resources.files(__name__).joinpath("page.html").read_text("utf-8")
    before, after = template.replace("@NONCE@", secrets.token_urlsafe(16)).split("@DATA@")
    return before + data + after


def write_page(path: str, document: dict[str, Any]) -> None:
    """Write the page with a document. Raises InputError."""
    page = render(document)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another path") from None
