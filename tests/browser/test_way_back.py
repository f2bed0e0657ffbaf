"""Pages of the site that are not in its menu lead back to it, and wide tables scroll. About 2 s."""

import shutil
from pathlib import Path

import pages
import pytest

WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait

SITE = Path(__file__).parents[2] / "build/site"  # `make test-browser` builds it


@pytest.fixture(scope="module")
def address(serve):
    return serve(SITE)


def links(browser, selector):
    """Wait until the page has such links, and return their addresses."""
    script = "return [...document.querySelectorAll(arguments[0])].map(each => each.href)"
    return WebDriverWait(browser, 10).until(lambda _: browser.execute_script(script, selector))


def test_the_page_of_an_example_leads_back_to_all_examples(browser, address):
    browser.get(f"{address}/examples.html")
    shown = [url for url in links(browser, "article td:first-child a") if "/project/" in url]
    assert len(shown) > 25
    for url in shown:
        article = (SITE / url.removeprefix(f"{address}/")).read_text().partition("<article")[2]
        assert '/examples.html"' in article, url


def test_the_page_for_an_unknown_address_works_in_a_folder_of_a_server(browser, serve, tmp_path):
    shutil.copytree(SITE, tmp_path / "a/folder")
    root = serve(tmp_path)
    pages.requested(browser)
    browser.get(f"{root}/a/folder/404.html")
    shown = links(browser, "article a")
    assert f"{root}/a/folder/index.html" in shown
    assert [url for url in shown if not (tmp_path / url.removeprefix(f"{root}/")).is_file()] == []
    outside = [url for url in pages.requested(browser) if not url.startswith((f"{root}/a/folder/", "data:", "blob:"))]
    assert outside in ([], [f"{root}/favicon.ico"])
    assert pages.console_errors(browser) == []


def test_code_in_a_table_is_not_broken_and_a_wide_table_scrolls(browser, address):
    pages.set_size(browser, 400)
    browser.get(f"{address}/examples.html")
    scrolls = "return [...document.querySelectorAll('.md-typeset__scrollwrap')].map(e => e.scrollWidth > e.clientWidth)"
    WebDriverWait(browser, 20).until(lambda _: any(browser.execute_script(scrolls)))  # a script makes the elements
    style = "return getComputedStyle(document.querySelector('td code'))[arguments[0]]"
    assert browser.execute_script(style, "overflowWrap") == "normal"
    assert browser.execute_script(style, "wordBreak") == "normal"
    pages.set_size(browser, 1400)
