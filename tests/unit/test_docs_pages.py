"""README.md and the pages of docs/: length, width of code, links, and the table of extras."""

import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_lines(text):
    """Yield (line number, line) of the code blocks of a page."""
    fence = None
    for number, line in enumerate(text.splitlines(), start=1):
        found = re.match(r" *(```+|~~~+)", line)
        if fence:
            if found and found[1].startswith(fence):
                fence = None
            else:
                yield number, line
        elif found:
            fence = found[1]


def anchors(page):
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_has_at_most_80_columns(page):
    wide = [f"{page.name}:{number}: {line}" for number, line in code_lines(page.read_text()) if len(line) > 80]
    assert not wide, "shorten (of docs/api.md: the docstring, then `make api`):\n" + "\n".join(wide)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", page.read_text())):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_code_lines_of_a_page():
    text = "a\n```python\nb\n```\nc\n~~~~~~ text\nd\n```\n~~~~~~\n"
    assert list(code_lines(text)) == [(3, "b"), (7, "d"), (8, "```")]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150, "move details to docs/"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "docs/site/mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = re.findall(r": (\S+\.md)$", navigation, flags=re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES[1:]]


def test_the_table_of_extras_agrees_with_pyproject():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {name: [re.match(r"[\w-]+", package)[0] for package in packages] for name, packages in extras.items()}
    section = (ROOT / "docs/install.md").read_text().partition("\n## Extras\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \| .+ \|$", section, flags=re.MULTILINE)
    listed = {name: packages.split(", ") for name, packages in rows}
    assert len(listed) == len(rows), "an extra is in the table twice"
    assert listed == declared, "correct the table under Extras in docs/install.md"
