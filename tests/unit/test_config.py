import dataclasses
import pathlib
import re
import sys

import pytest

from allred.config import Config, explicit_settings, parse_bytes, settle
from allred.errors import ConfigError

sys.path.append(str(pathlib.Path(__file__).parents[2] / "docs/site"))
import write_settings


def test_nothing_set_is_the_defaults():
    assert explicit_settings({"HOME": "/"}, {"mode": None}) == {}
    assert settle([{}, {}]) == Config()


def test_arguments_override_variables():
    environ = {"ALLRED_BUCKET_BYTES": "64KiB", "ALLRED_TIMEOUT_S": "2.5", "ALLRED_BANNER": "0"}
    assert explicit_settings(environ, {"bucket_bytes": 4096}) == {
        "bucket_bytes": 4096,
        "timeout_s": 2.5,
        "banner": False,
    }


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ALLRED_BUCKETBYTES", "1", "unknown variable ALLRED_BUCKETBYTES; did you mean ALLRED_BUCKET_BYTES?"),
        (
            "ALLRED_SERVERS",
            "2",
            "unknown variable ALLRED_SERVERS; known variables are ALLRED_MODE, ALLRED_LOCAL_STEPS, ALLRED_NUM_PS, ",
        ),
        ("ALLRED_mode", "sync", "unknown variable ALLRED_mode; did you mean ALLRED_MODE?"),
        (
            "ALLRED_QQQQ_WWWW",
            "1",
            "unknown variable ALLRED_QQQQ_WWWW; known variables are ALLRED_MODE, ALLRED_LOCAL_STEPS, ALLRED_NUM_PS",
        ),
        ("ALLRED_MODE", "fast", "ALLRED_MODE='fast' is not available; choose one of sync, local, ps"),
        ("ALLRED_NUM_PS", "0", "ALLRED_NUM_PS='0' is too small; it must be at least 1"),
        ("ALLRED_NUM_PS", "two", "ALLRED_NUM_PS='two' is not a whole number of ranks"),
        ("ALLRED_CONSISTENCY", "ssp", "ALLRED_CONSISTENCY='ssp' is not available; choose one of async, bounded, sync"),
        ("ALLRED_STALENESS", "-1", "ALLRED_STALENESS='-1' is too small; it must be at least 0"),
        ("ALLRED_STALENESS", "1.5", "ALLRED_STALENESS='1.5' is not a whole number of steps"),
        ("ALLRED_PLACEMENT", "size", "choose one of bytes, round_robin, greedy"),
        ("ALLRED_USE_LOCKING", "no", "ALLRED_USE_LOCKING='no' is not 1 or 0"),
        ("ALLRED_BACKEND", "gloo", "choose one of auto, single, shm, mpi, nccl"),
        ("ALLRED_NCCL_CROSS", "tcp", "choose one of nccl, mpi"),
        ("ALLRED_BUCKET_BYTES", "many", "ALLRED_BUCKET_BYTES='many' is not a size such as 4MiB"),
        ("ALLRED_BUCKET_BYTES", "0", "too small; it must be at least 1"),
        ("ALLRED_ARENA", "yes", "ALLRED_ARENA='yes' is not auto, 0 or a size of at least 16KiB, such as 4GiB"),
        ("ALLRED_TIMEOUT_S", "nan", "too small"),
        ("ALLRED_TIMEOUT_S", "0", "too small; it must be at least 0.001"),
        ("ALLRED_TIMEOUT_S", "soon", "ALLRED_TIMEOUT_S='soon' is not a number"),
        ("ALLRED_NONFINITE", "hope", "ALLRED_NONFINITE='hope' is not available; choose one of raise, skip, ignore"),
        ("ALLRED_CHECK_STEPS", "1KiB", "ALLRED_CHECK_STEPS='1KiB' is not a whole number of steps"),
        ("ALLRED_CHECK_STEPS", "-1", "ALLRED_CHECK_STEPS='-1' is too small; it must be at least 0"),
        ("ALLRED_ARENA", "1", "ALLRED_ARENA='1' is not auto, 0 or a size of at least 16KiB, such as 4GiB"),
        ("ALLRED_BANNER", "maybe", "ALLRED_BANNER='maybe' is not 1 or 0"),
    ],
)
def test_what_cannot_be_used_is_named(variable, value, message):
    with pytest.raises(ConfigError, match=message):
        explicit_settings({variable: value}, {})


@pytest.mark.parametrize(("value", "parsed"), [("auto", "auto"), ("0", "0"), ("64KiB", "65536"), ("16384", "16384")])
def test_a_size_may_be_automatic(value, parsed):
    assert explicit_settings({"ALLRED_ARENA": value}, {}) == {"arena": parsed}


def test_arguments_are_checked_too():
    with pytest.raises(ConfigError, match=r"init\(mode=3\) is not a string"):
        explicit_settings({}, {"mode": 3})
    with pytest.raises(ConfigError, match=r"init\(check_steps=2.5\) is not a whole number of steps"):
        explicit_settings({}, {"check_steps": 2.5})
    with pytest.raises(ConfigError, match=r"init\(bucket_bytes=True\)"):
        explicit_settings({}, {"bucket_bytes": True})


def test_a_rank_without_settings_takes_the_chiefs():
    assert settle([{"timeout_s": 5.0}, {}, {"timeout_s": 5.0}]).timeout_s == 5.0
    assert settle([{"network": "eth0"}, {"network": "eth1"}]).network == "eth0"


def test_a_rank_that_differs_from_the_chief_is_named():
    with pytest.raises(
        ConfigError,
        match=r"timeout_s is 1800.0 on rank 0 but 5.0 on rank 1; set the same value .*-x ALLRED_TIMEOUT_S=1800.0",
    ):
        settle([{}, {"timeout_s": 5.0}])


def test_a_problem_names_its_rank_unless_all_ranks_have_it():
    with pytest.raises(ConfigError, match=r"^rank 1: bad"):
        settle([{}, "bad"])
    with pytest.raises(ConfigError, match=r"^bad$"):
        settle(["bad", "bad"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), (7, 7), ("64KiB", 65536), ("1 MB", 10**6), ("1.5 MiB", 3 * 2**19), ("2gb", 2 * 10**9), ("3b", 3)],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "1TB", "KiB", "1e6", None, True, 1.5])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"is not a (size|whole number of bytes)"):
        parse_bytes(text)


def test_every_setting_has_a_description():
    assert all(field.metadata["meaning"] for field in dataclasses.fields(Config))


def test_the_page_of_settings_is_current_and_its_defaults_are_the_texts_of_variables():
    page = write_settings.PAGE.read_text()
    assert page == write_settings.page(), "docs/settings.md is not current; run `make settings`"
    rows = dict(re.findall(r"^### `ALLRED_(\w+)`\n\n.+\n\nDefault: `([^`]+)`$", page, flags=re.MULTILINE))
    assert {name.lower() for name in rows} == {field.name for field in dataclasses.fields(Config)}
    assert settle([explicit_settings({f"ALLRED_{name}": value for name, value in rows.items()}, {})]) == Config()
