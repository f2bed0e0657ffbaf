"""README.md and the pages of docs/: length, code blocks, links, the menu, examples, and the table of extras."""

import pathlib
import re
import runpy
import tomllib

import pytest
from page_blocks import FRAGMENT, blocks, programs

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/reference").glob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


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
    """Return the anchors of the headings of a page, as GitHub makes them, and of the entries of the reference."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    entries = re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)
    return {*entries, *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_code_has_at_most_80_columns(page):
    wide = [f"{page.name}:{number}: {line}" for number, line in code_lines(page.read_text()) if len(line) > 80]
    assert not wide, "shorten:\n" + "\n".join(wide)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_and_headings(page):
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", page.read_text())):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_code_lines_of_a_page():
    text = "a\n```python\nb\n```\nc\n~~~~~~ text\nd\n```\n~~~~~~\n"
    assert list(code_lines(text)) == [(3, "b"), (7, "d"), (8, "```")]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100, "move details to docs/"


def test_pictures_are_current():
    draw = runpy.run_path(str(ROOT / "docs/site/draw_pictures.py"))["PICTURES"]
    for name, picture in draw.items():
        assert (ROOT / "docs/pictures" / name).read_text() == picture(), "run `make diagram`"


def test_every_page_is_in_the_menu_by_its_heading():
    """A page in the menu without a title has that of its heading."""
    navigation = (ROOT / "docs/site/mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"^ +- (\S+\.md)$", navigation, flags=re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in sorted((ROOT / "docs").rglob("*.md"))]
    assert sorted(listed) == sorted(page for page in pages if not page.startswith("site/"))
    titles = [re.search(r"^# (.+)$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)[1] for page in listed]
    assert len(set(titles)) == len(titles)


def examples():
    """Return {path in examples/: the command of the table in docs/examples.md}."""
    text = (ROOT / "docs/examples.md").read_text()
    return dict(re.findall(r"^\| \[[\w.]+\]\(\.\./examples/([\w./]+)\) \| .+ \| `(.+)` \|$", text, flags=re.MULTILINE))


def test_every_example_is_on_the_page_of_examples_with_a_command_of_its_own():
    folders = ("*.py", "hpc/*", "kubernetes/*")
    files = [str(file.relative_to(ROOT / "examples")) for each in folders for file in (ROOT / "examples").glob(each)]
    assert sorted(examples()) == sorted(file for file in files if not file.endswith(("__pycache__", "~")))
    for file, command in examples().items():
        assert command in (ROOT / "examples" / file).read_text(), f"{file} does not show: {command}"


def test_start_page_and_readme_show_the_examples():
    """The tests run them from one of these."""
    for name, torch in (("train.py", False), ("train_torch.py", True)):
        program = (ROOT / "examples" / name).read_text().partition('"""\n\n')[2]
        assert programs("index.md", torch) == programs("../README.md", torch) == [program]


RUN = "\n".join(
    file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py")) if file != pathlib.Path(__file__)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_program_is_run_and_another_block_is_marked_as_a_fragment(page):
    """A test that names the page runs all its programs: it unpacks the list that programs() returns."""
    if any(not block.startswith(FRAGMENT) for block in blocks(page, "python")):
        assert f'"{page.name}"' in RUN or f'"../{page.name}"' in RUN, f"run the programs, or begin with {FRAGMENT}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_leaves_no_variable_behind(page):
    """A variable that stays in the shell changes the next command of the page."""
    for block in blocks(page, "sh"):
        left = re.findall(r"^(?:export .*|\w+=(?:[^\s\"']*|\"[^\"]*\"|'[^']*')(?: *#.*)?)$", block, flags=re.MULTILINE)
        assert not left, f"write it before a command: {left}"


def test_the_table_of_extras_agrees_with_pyproject():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {name: [re.match(r"[\w-]+", package)[0] for package in packages] for name, packages in extras.items()}
    section = (ROOT / "docs/install.md").read_text().partition("\n## Extras\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \| .+ \|$", section, flags=re.MULTILINE)
    listed = {name: packages.split(", ") for name, packages in rows}
    assert len(listed) == len(rows), "an extra is in the table twice"
    assert listed == declared, "correct the table under Extras in docs/install.md"
