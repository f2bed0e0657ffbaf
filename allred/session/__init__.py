"""The training loop: checkpoints and resuming, hooks, logging, and the end of training on all ranks."""

from allred.session.average import Averaging, MovingAverage

from allred.session.hooks import EarlyStopping, GlobalStepWaiter, Hook, Logging, NanLoss, Notify, Outcome  # isort: skip
from allred.session.hooks import StepCounter, StopAtStep, Summary  # isort: skip
from allred.session.progress import Rates, display
from allred.session.saver import Checkpoint
from allred.session.session import Session
from allred.session.summary import SummaryWriter

__all__ = [
    "Averaging", "Checkpoint", "EarlyStopping", "GlobalStepWaiter", "Hook", "Logging", "MovingAverage", "NanLoss",
    "Notify", "Outcome", "Rates", "Session", "StepCounter", "StopAtStep", "Summary", "SummaryWriter", "display",
]  # fmt: skip
