"""The second argument of a map_fun: which task of the cluster this rank is, its data feed, and the model it exports.

A model is a directory: its parameters in params.safetensors, and its predict function, pickled by value.
"""

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from allred.cluster.spec import SERVERS, task_name
from allred.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from allred.server import Server
    from allred.spark.data_feed import DataFeed


_PARAMS, _PREDICT = "params.safetensors", "predict.pkl"


class NodeContext:
    """The task of this rank, with the attributes of TensorFlowOnSpark's TFNodeContext.

    job_name: "ps" or "worker". task_index: number in this job. worker_num, executor_id: the rank among all tasks.
    num_workers: number of workers. cluster_spec: {job name: addresses}. working_dir: the current directory.
    """

    def __init__(self, rank: int, num_ps: int, addresses: list[str], feed: str) -> None:
        jobs = {SERVERS: addresses[:num_ps], "worker": addresses[num_ps:]}
        self.cluster_spec: dict[str, list[str]] = {job: tasks for job, tasks in jobs.items() if tasks}
        self.job_name = SERVERS if rank < num_ps else "worker"
        self.task_index = rank if rank < num_ps else rank - num_ps
        self.worker_num = self.executor_id = rank
        self.num_workers = len(addresses) - num_ps
        self.working_dir = os.getcwd()
        self._feed, self._has_feed = feed, False

    def start_cluster_server(self) -> tuple[dict[str, list[str]], "Server"]:
        """Join the other tasks: call allred.Server. Return cluster_spec and the server, whose join() serves on "ps".

        Use it or allred.init(), which lets a server serve from the line where the optimizer is made.
        """
        from allred.server import Server

        sizes = {job: len(tasks) for job, tasks in self.cluster_spec.items()}
        return self.cluster_spec, Server(sizes, self.job_name, self.task_index)

    def get_data_feed(self, train: bool = True, input_mapping: Mapping[str, str] | None = None) -> "DataFeed":
        """Return the feed of a worker in InputMode.SPARK.

        train: False for inference: a batch ends at the end of a partition, and `batch_results` returns the results.
        input_mapping: {column of the DataFrame: name in a batch}; default: all columns under their names.

        Raises InputError on a server, in InputMode.FILES, and at the second call.
        """
        from allred.spark.data_feed import DataFeed

        name = task_name(self.job_name, self.task_index)
        if self.job_name == SERVERS:
            raise InputError(f"get_data_feed: {name} is a parameter server; only workers are fed")
        if not self._feed:
            raise InputError(f"get_data_feed: {name} is not fed: this needs AllredCluster.run(..., InputMode.SPARK)")
        if self._has_feed:
            raise InputError(f"get_data_feed: {name} has called it already; keep the feed of the first call")
        self._has_feed = True
        return DataFeed(self._feed, name, train, input_mapping)

    def export_model(
        self, directory: str | os.PathLike[str], predict: Callable[..., Any], params: Mapping[str, Any]
    ) -> None:
        """Write a model for `allred.spark.ml.AllredModel`, on worker 0 only; the other tasks return at once.

        directory: on a file system that all executors share; it is created. predict: called as predict(params, inputs)
        with dicts of arrays by name; it returns an array with a row for each row of the inputs, or a dict of such
        arrays. params: arrays by name.
        """
        if not os.fspath(directory):
            raise InputError("export_model: the directory is empty; set it with AllredEstimator.setExportDir")
        if self.job_name == "worker" and self.task_index == 0:
            write_model(Path(directory), predict, params)


def write_model(directory: Path, predict: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Write the files. Replaces an existing model, not atomically: there are two files. Raises CheckpointError."""
    import cloudpickle
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(value) for name, value in params.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(arrays, directory / f".{_PARAMS}")
        (directory / f".{_PREDICT}").write_bytes(cloudpickle.dumps(predict))
        for name in (_PARAMS, _PREDICT):
            os.replace(directory / f".{name}", directory / name)
    except OSError as error:
        raise CheckpointError(f"the model cannot be written to {directory}: {error.strerror or error}") from None


def read_model(directory: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the predict function and the parameters. Raises CheckpointError."""
    from safetensors.numpy import load_file

    try:
        predict = pickle.loads((Path(directory) / _PREDICT).read_bytes())
        return predict, load_file(Path(directory) / _PARAMS)
    except OSError as error:
        raise CheckpointError(
            f"there is no model in {directory} ({error.strerror or error}): map_fun writes it with ctx.export_model, "
            "to a directory that all executors share"
        ) from None
