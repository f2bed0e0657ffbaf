"""The search of the site finds a page by the words that people ask with: it is among the first three results.

A row whose page is not in docs/ is skipped.
"""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allred import errors
from allred.config import Config

DOCS = Path(__file__).parents[2] / "docs"

QUERIES = [
    # Symptoms
    ("hang", "troubleshooting"),
    ("stall", "failures"),
    ("deadlock", "troubleshooting"),
    ("how failures are tested", "reliability"),
    ("slow", "troubleshooting"),
    ("stuck", "failures"),
    ("nan", "mistakes"),
    ("nan", "troubleshooting"),
    ("loss differs", "troubleshooting"),
    ("shared memory", "troubleshooting"),
    ("straggler", "timeline"),
    ("killed", "failures"),
    ("timeout", "settings"),
    ("debug", "notebooks"),
    ("profiling", "timeline"),
    ("communication time", "timeline"),
    # Tasks
    ("embedding", "embeddings"),
    ("embedding lookup", "embeddings"),
    ("install", "install"),
    ("open mpi", "install"),
    ("example", "examples"),
    ("tutorial", "tutorial"),
    ("getting started", "index"),
    ("multi-node", "hosts"),
    ("ssh", "hosts"),
    ("slow links", "slow-links"),
    ("scaling", "scaling"),
    ("cost model", "scaling"),
    ("recursive halving", "scaling"),
    ("quantized gradients int8", "slow-links"),
    ("slurm", "running"),
    ("restart", "running"),
    ("elastic", "recovery"),
    ("recovery", "recovery"),
    ("checkpoint", "sessions"),
    ("resume", "sessions"),
    ("early stopping", "sessions"),
    ("evaluate", "evaluation"),
    ("validation accuracy", "evaluation"),
    ("best model", "evaluation"),
    ("tensorboard", "logging"),
    ("wandb", "logging"),
    ("mlflow", "logging"),
    ("prometheus", "running"),
    ("jupyter", "notebooks"),
    ("batch size", "batch-size"),
    ("learning rate", "batch-size"),
    ("gradient accumulation", "optimizer"),
    ("gradient clipping", "precision"),
    ("uneven", "data"),
    ("shuffle", "data"),
    ("mixed precision", "precision"),
    ("fp16", "precision"),
    ("gpu", "gpus"),
    ("nccl", "gpus"),
    ("parameter server", "modes"),
    ("overlap", "overlap"),
    ("pytest", "testing"),
    ("bandwidth", "doctor"),
    ("blas threads", "doctor"),
    # Other libraries
    ("pytorch", "torch"),
    ("DistributedDataParallel", "from-ddp"),
    ("torchrun", "torch"),
    ("horovod", "from-horovod"),
    ("tensorflow", "from-tensorflow"),
    ("mpi4py", "from-mpi4py"),
    ("kubernetes", "kubernetes"),
    ("spark", "spark"),
    ("jax", "jax"),
    ("optax", "jax"),
    ("keras", "keras"),
    ("dask", "comparison"),
    ("ray", "comparison"),
    # Names
    ("glossary", "glossary"),
    ("allreduce", "reference/collectives"),
    ("allred.allreduce", "reference/collectives"),
    ("ProcessSet", "reference/collectives"),
    ("process set", "reference/collectives"),
    ("broadcast_object", "reference/collectives"),
    *((name, "reference/errors") for name, value in vars(errors).items() if inspect.isclass(value)),
    *((f"ALLRED_{field.name.upper()}", "settings") for field in dataclasses.fields(Config)),
]


@pytest.fixture(scope="module")
def search(browser: Any, site: str) -> Callable[[str], list[str]]:
    """search(QUERY) returns the addresses of the pages found, relative to the site, best first.

    The empty text between two queries removes the results of the first from the page.
    """
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{site}/index.html")
    wait = WebDriverWait(browser, 20, poll_frequency=0.01)

    def enter(text: str) -> None:
        script = "const e = document.querySelector('.md-search__input'); e.focus(); e.value = arguments[0];"
        browser.execute_script(f"{script} e.dispatchEvent(new Event('keyup'));", text)

    def found() -> tuple[str, list[str]]:
        """Return the line above the results, and the addresses of the pages."""
        return browser.execute_script("""
          const links = document.querySelectorAll('.md-search-result__item > a:first-child');
          const line = document.querySelector('.md-search-result__meta').innerText;
          return [line, [...links].map(link => new URL(link.href).pathname)]""")

    def search(query: str) -> list[str]:
        enter("")
        wait.until(lambda _: found()[0].startswith("Type to"))
        enter(query)
        wait.until(lambda _: "matching" in found()[0])
        return [path.removeprefix("/").removesuffix(".html") for path in found()[1]]

    return search


@pytest.mark.parametrize(("query", "page"), QUERIES)
def test_a_page_is_found(search: Callable[[str], list[str]], query: str, page: str) -> None:
    if not (DOCS / f"{page}.md").exists():
        pytest.skip(f"docs/{page}.md does not exist")
    found = search(query)
    assert page in found[:3], f"{query!r}: {page} is at position {found.index(page) + 1 if page in found else '> all'}"
