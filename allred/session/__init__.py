"""The training loop: what is around the steps that a user writes. Checkpoints and resuming, hooks, who may stop it."""

from allred.session.average import MovingAverage
from allred.session.hooks import (
    Averaging,
    EarlyStopping,
    GlobalStepWaiter,
    Hook,
    NanLoss,
    Notify,
    Outcome,
    StopAtStep,
)
from allred.session.keeping import Checkpoint
from allred.session.progress import display
from allred.session.rates import Rates
from allred.session.session import Session
from allred.session.summary import SummaryWriter
from allred.session.telling import Logging, StepCounter, Summary

__all__ = [
    "Averaging",
    "Checkpoint",
    "EarlyStopping",
    "GlobalStepWaiter",
    "Hook",
    "Logging",
    "MovingAverage",
    "NanLoss",
    "Notify",
    "Outcome",
    "Rates",
    "Session",
    "StepCounter",
    "StopAtStep",
    "Summary",
    "SummaryWriter",
    "display",
]
