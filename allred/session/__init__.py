"""The training loop: what is around the steps that a user writes. Checkpoints and resuming, hooks, who may stop it."""

from allred.session.hooks import EarlyStopping, GlobalStepWaiter, Hook, NanLoss, Notify, Outcome, StopAtStep
from allred.session.session import Session
from allred.session.telling import Logging, StepCounter, Summary

__all__ = [
    "EarlyStopping",
    "GlobalStepWaiter",
    "Hook",
    "Logging",
    "NanLoss",
    "Notify",
    "Outcome",
    "Session",
    "StepCounter",
    "StopAtStep",
    "Summary",
]
