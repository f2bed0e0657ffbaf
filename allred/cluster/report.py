"""The old names of allred/log.py."""

from allred.log import info as inform
from allred.log import rank_warning as say_here
from allred.log import runtime_warning as warn
from allred.log import warning as say

__all__ = ["inform", "say", "say_here", "warn"]
