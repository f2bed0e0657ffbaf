"""The code blocks of README.md and of the pages of docs/.

A Python block is a program that a test runs as it is, or begins with `# Part of a program`.
"""

import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parents[1]
FRAGMENT = "# Part of a program"


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in docs/, also those in tabs, which are indented."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in found]


def programs(page: str, torch: bool = False) -> list[str]:
    """Return the programs of a page, without those with torch or those only. tests/pytorch runs the ones with torch."""
    found = [block for block in blocks(page, "python") if not block.startswith(FRAGMENT)]
    return [block for block in found if ("import torch" in block) == torch]
