"""`Checkpoints`: checkpoints of `model.fit`, by a session of allred (allred/session/session.py)."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import keras

from allred.errors import InputError
from allred.session.session import Session


class Checkpoints(keras.callbacks.Callback):
    """Saves the model and its optimizer during `model.fit`, and restores the newest checkpoint. Collective.

        checkpoints = allred.keras.callbacks.Checkpoints("ckpt", model, save_secs=600)
        model.fit(x, y, epochs=10, initial_epoch=checkpoints.epoch, callbacks=[checkpoints])

    model: built and compiled, with an optimizer of `allred.keras.distributed`. If there is no checkpoint, all ranks get
        the weights and the state of the optimizer of rank 0.
    save_secs, save_steps, keep: see `allred.Session`. A checkpoint is also written at the end, and after an error.

    The attribute `epoch` is the number of completed epochs, with those of earlier runs; pass it as `initial_epoch`. An
    epoch that was not completed begins again. SIGTERM, SIGUSR1 and a first Ctrl-C end `fit` on all ranks after the
    current batch, and after the validation if there is one.

    Raises InputError, and CheckpointError if no checkpoint can be read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: Any,
        *,
        save_secs: float | None = None,
        save_steps: int | None = None,
        keep: int = 5,
    ) -> None:
        super().__init__()
        if not hasattr(getattr(model, "optimizer", None), "allred"):
            raise InputError("Checkpoints: compile the model with an optimizer of allred.keras.distributed before")
        self.epoch, self._current, self._is_stopped = 0, 0, False
        self._session = Session(directory, save_secs=save_secs, save_steps=save_steps, keep=keep, log_steps=None)
        self._session.__enter__()
        self._session.track(params=model, optimizer=model.optimizer, epoch=self)
        self._averager = model.optimizer.allred
        self._steps: Iterator[None] = self._session.steps(itertools.repeat(None))

    def state_dict(self) -> dict[str, Any]:
        """Internal: for the session."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Internal: for the session."""
        self.epoch = state["epoch"]

    def on_train_begin(self, logs: Any = None) -> None:
        self._next_step()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._current = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == self.params.get("steps"):
            self.epoch = self._current + 1
        self._next_step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._is_stopped:  # in the middle of the epoch
            self.epoch = epoch + 1
        self._averager.keep_weights()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._averager.forget_weights()

    def on_train_end(self, logs: Any = None) -> None:
        self._session.end()
        self._averager.forget_weights()

    def _next_step(self) -> None:
        """End the current step, and begin the next one, or stop."""
        if next(self._steps, self) is self:
            self._is_stopped = self.model.stop_training = True
