"""Functions at the end of a process: what the integration tests of exits do not show."""

import gc
import sys
import threading

from allred.runtime import process_end


def test_nothing_is_collected_while_the_frames_of_threads_are_read(monkeypatch):
    """Before Python 3.11.9 the process could hang."""
    assert process_end.top_frame(threading.get_ident()).f_code is process_end.top_frame.__code__
    assert process_end.top_frame(0) is None
    enabled = []
    monkeypatch.setattr(sys, "_current_frames", lambda: enabled.append(gc.isenabled()) or {})
    process_end.top_frame(0)
    assert gc.isenabled()
    gc.disable()
    try:
        process_end.top_frame(0)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert enabled == [False, False]
