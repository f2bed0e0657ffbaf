"""The variables HOROVOD_*: which settings follow from them, and which are named."""

import pytest

pytest.importorskip("torch")

from allred.config import explicit_settings
from allred.errors import ConfigError
from allred.horovod import variables

NEVER_S = 1_000_000


@pytest.mark.parametrize(("given", "settings"), [
    ({"STALL_CHECK_TIME_SECONDS": "90"}, {"stall_warning_s": 90}),
    ({"STALL_CHECK_TIME_SECONDS": "0"}, {"stall_warning_s": 1}),
    ({"STALL_SHUTDOWN_TIME_SECONDS": "120"}, {"timeout_s": 120}),
    ({"STALL_SHUTDOWN_TIME_SECONDS": "0"}, {"timeout_s": NEVER_S}),
    ({"STALL_SHUTDOWN_TIME_SECONDS": "59"}, {"timeout_s": NEVER_S}),
    ({"STALL_SHUTDOWN_TIME_SECONDS": "5", "STALL_CHECK_TIME_SECONDS": "5"}, {"stall_warning_s": 5, "timeout_s": 5}),
    ({"STALL_CHECK_DISABLE": "1", "STALL_SHUTDOWN_TIME_SECONDS": "99"},
     {"stall_warning_s": NEVER_S, "timeout_s": NEVER_S}),
    ({"STALL_CHECK_DISABLE": "0", "STALL_CHECK_TIME_SECONDS": ""}, {}),
    ({"GLOO_IFACE": "eth0"}, {"network": "eth0"}),
])  # fmt: skip
def test_settings_that_follow(given, settings):
    found, ignored = variables.translate({f"HOROVOD_{name}": value for name, value in given.items()})
    assert (explicit_settings(found, {}), ignored) == (settings, [])


def test_variables_without_effect_are_named():
    named = ["HOROVOD_AUTOTUNE", "HOROVOD_CYCLE_TIME", "HOROVOD_NO_SUCH_NAME", "HOROVOD_TIMELINE_MARK_CYCLES"]
    silent = ["HOROVOD_RANK", "HOROVOD_TIMELINE", "HOROVOD_WITH_PYTORCH", "HOROVOD_GPU_ALLREDUCE", "HOROVOD_CONTROLLER"]
    assert variables.translate(dict.fromkeys([*silent, *named, "HOME", "ALLRED_MODE"], "1")) == ({}, named)


def test_a_wrong_value_is_an_error():
    with pytest.raises(ConfigError, match=r"HOROVOD_STALL_CHECK_TIME_SECONDS='1m' is not a whole number"):
        variables.translate({"HOROVOD_STALL_CHECK_TIME_SECONDS": "1m"})
    with pytest.raises(ConfigError, match=r"HOROVOD_STALL_CHECK_TIME_SECONDS='²' is not a whole number"):
        variables.translate({"HOROVOD_STALL_CHECK_TIME_SECONDS": "²"})
    with pytest.raises(ConfigError, match=r"HOROVOD_STALL_CHECK_DISABLE='true' is not a switch; write 1 or 0"):
        variables.translate({"HOROVOD_STALL_CHECK_DISABLE": "true"})


def test_settings_of_allred_win_and_names_are_printed_once(capfd):
    environ = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "90", "ALLRED_STALL_WARNING_S": "7", "HOROVOD_TEST_ONLY": "1"}
    variables.apply(environ)
    variables.apply(environ)
    assert environ["ALLRED_STALL_WARNING_S"] == "7"
    assert capfd.readouterr().err == (
        "allred: these variables have no effect in allred: HOROVOD_TEST_ONLY (docs/from-horovod.md)\n"
    )
