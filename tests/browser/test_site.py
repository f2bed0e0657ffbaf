"""The pages of the site: width on a narrow screen, messages of the console, addresses loaded; examples in the menu."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pages
import pytest

ROOT = Path(__file__).parents[2]
BUILT = sorted(path.relative_to(ROOT / "build/site").as_posix() for path in (ROOT / "build/site").rglob("*.html"))


@pytest.fixture
def narrow(browser: Any) -> Iterator[Any]:
    """The browser on a screen of 400 pixels."""
    pages.set_size(browser, 400)
    yield browser
    pages.set_size(browser, 1400)


def links(browser: Any, selector: str) -> list[str]:
    """Return the addresses of the links in an element."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0] + ' a[href]')].map(a => a.href)", selector
    )


def test_a_page_is_as_wide_as_a_narrow_screen_and_loads_nothing_from_elsewhere(narrow: Any, site: str) -> None:
    """One test of all pages: each takes 0.2 s."""
    assert "index.html" in BUILT
    wrong = []
    for page in BUILT:
        pages.requested(narrow)
        narrow.get(f"{site}/{page}")
        if width := pages.overflow(narrow):
            wrong.append(f"{page} is {width} pixels wider than the screen")
        elsewhere = [url for url in pages.requested(narrow) if not url.startswith((f"{site}/", "data:"))]
        wrong += [f"{page} loads {url}" for url in elsewhere]
        wrong += [f"{page}: {message}" for message in pages.console_errors(narrow)]
    assert not wrong, "\n".join(wrong)


def test_each_example_is_linked_from_a_page_in_the_menu(browser: Any, site: str) -> None:
    if not (ROOT / "docs/examples.md").exists():
        pytest.skip("docs/examples.md does not exist")
    browser.get(f"{site}/index.html")
    assert f"{site}/examples.html" in links(browser, ".md-nav--primary")
    browser.get(f"{site}/examples.html")
    linked = set(links(browser, "article"))
    files = [path for path in (ROOT / "examples").rglob("*") if path.suffix in {".py", ".sbatch", ".sh", ".yaml"}]
    missing = [
        name for path in files if urljoin(site, f"project/{(name := path.relative_to(ROOT))}.html") not in linked
    ]
    assert not missing, f"docs/examples.md has no link to {missing}"


def test_the_reference_mentions_no_private_name(browser: Any, site: str) -> None:
    names = [page for page in BUILT if page.startswith("reference/")]
    assert len(names) >= 15
    for page in names:
        browser.get(f"{site}/{page}")
        words = set(browser.execute_script("return document.querySelector('article').innerText").split())
        private = {word for word in words if re.search(r"(^|[.\[(])_[A-Za-z]", word)}
        assert private <= {"_async.", "_async"}, page
