"""An Estimator and a Model of Spark ML, as TensorFlowOnSpark's pipeline.

    estimator = AllredEstimator(map_fun, args).setInputMapping({"pixels": "x", "digit": "y"}).setClusterSize(3)
    model = estimator.setExportDir("/shared/model").setOutputMapping({"digit": "prediction INT"}).fit(df)
    model.transform(df)

Importing it needs pyspark and pyarrow.
"""

# ruff: noqa: N802, N815  (names of Spark)

import argparse
import base64
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

try:
    import cloudpickle
    import pyarrow as pa
    import pyspark  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"allred.spark.ml needs {error.name}, and {sys.executable} has none: "
        "pip install pyspark pyarrow 'pandas<3' cloudpickle",
        name=error.name,
    ) from None

from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructType

from allred.errors import InputError
from allred.spark.arrow_columns import to_rows
from allred.spark.node_context import read_model
from allred.spark.spark_cluster import AllredCluster, InputMode
from allred.validators import integer


def _mapping(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in (*value, *value.values())):
        raise TypeError(f"expected a dict of strings, got {value!r}")
    return dict(value)


def _setter(param: str, doc: str) -> Callable[[Any, Any], Any]:
    """Return the method that sets a Param, and returns the object."""

    def method(self: Any, value: Any) -> Any:
        return self._set(**{param: value})

    method.__doc__ = doc
    method.__name__ = method.__qualname__ = "set" + param[0].upper() + param[1:]
    return method


class _ModelParams(Params):
    """The Params that estimator and model share."""

    inputMapping = Param(Params._dummy(), "inputMapping", "{column: name in a batch}", _mapping)
    outputMapping = Param(Params._dummy(), "outputMapping", "{name of a result: 'column TYPE'}", _mapping)
    batchSize = Param(Params._dummy(), "batchSize", "rows in a batch", TypeConverters.toInt)
    exportDir = Param(Params._dummy(), "exportDir", "directory of the exported model", TypeConverters.toString)

    setInputMapping = _setter(
        "inputMapping", "Set the columns that map_fun and the model read, and their names in a batch."
    )
    setOutputMapping = _setter(
        "outputMapping",
        """Set the columns that `transform` adds: {name in the dict that predict returns: "column TYPE"}, with a type of
        Spark SQL. If predict returns one array, one column with any name.""",
    )
    setBatchSize = _setter("batchSize", "Set the number of rows in a batch. Default: 100.")
    setExportDir = _setter("exportDir", "Set the directory of the model, on a file system that all executors share.")


class _PickledWriter(MLWriter):
    """Writes Params as JSON, and the attributes in `instance.pickled` with them."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        found = {name: getattr(self._instance, name) for name in self._instance.pickled}
        text = base64.b64encode(cloudpickle.dumps(found)).decode()
        spark = SparkSession.active()
        DefaultParamsWriter.saveMetadata(self._instance, path, spark, extraMetadata={"pickled": text})


class _PickledReader(MLReader[Any]):
    def __init__(self, cls: Any) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, SparkSession.active())
        found = self._cls(**pickle.loads(base64.b64decode(metadata["pickled"])))
        found._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(found, metadata)
        return found


class _Saved(MLWritable, MLReadable[Any]):
    pickled: tuple[str, ...] = ()

    def write(self) -> MLWriter:
        """Return the writer; `write().overwrite().save(path)` replaces a saved one."""
        return _PickledWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return the reader of `load(path)`."""
        return _PickledReader(cls)


class AllredEstimator(Estimator, _ModelParams, _Saved):
    """Trains with `map_fun(args, ctx)` on the rows of a DataFrame, in a cluster of InputMode.SPARK.

    args: a dict, or an object with attributes such as an argparse.Namespace. map_fun gets a copy, a Namespace, with the
    Params as attributes: batch_size, epochs, steps, cluster_size, num_ps, model_dir, export_dir, input_mapping. It
    reads `ctx.get_data_feed(input_mapping=args.input_mapping)`, and calls `ctx.export_model(args.export_dir, ...)`.

    Saved with `estimator.save(path)`: map_fun by value, so load only files that you trust.
    """

    clusterSize = Param(Params._dummy(), "clusterSize", "tasks, including the servers", TypeConverters.toInt)
    numPS = Param(Params._dummy(), "numPS", "parameter servers", TypeConverters.toInt)
    epochs = Param(Params._dummy(), "epochs", "passes over the rows", TypeConverters.toInt)
    steps = Param(Params._dummy(), "steps", "maximum number of steps; 0: no limit", TypeConverters.toInt)
    modelDir = Param(Params._dummy(), "modelDir", "directory of checkpoints", TypeConverters.toString)
    maxAttempts = Param(Params._dummy(), "maxAttempts", "attempts in total", TypeConverters.toInt)

    pickled = ("map_fun", "args")

    def __init__(self, map_fun: Callable[[Any, Any], Any], args: Any = None) -> None:
        super().__init__()
        self.map_fun, self.args = map_fun, args
        self._setDefault(
            inputMapping={}, outputMapping={}, batchSize=100, exportDir="", clusterSize=1, numPS=0, epochs=1, steps=0,
            modelDir="", maxAttempts=1,
        )  # fmt: skip

    setClusterSize = _setter("clusterSize", "Set the number of tasks, including the servers. Default: 1.")
    setNumPS = _setter("numPS", "Set the number of parameter servers. Default: 0.")
    setEpochs = _setter("epochs", "Set the number of passes over the rows. Default: 1.")
    setSteps = _setter("steps", "Set the maximum number of steps, which map_fun applies. Default: 0, no limit.")
    setModelDir = _setter("modelDir", "Set the directory of checkpoints, on a file system that all executors share.")
    setMaxAttempts = _setter(
        "maxAttempts", "Set the number of attempts in total. Default: 1, no restart after a failure."
    )

    def _fit(self, dataset: DataFrame) -> "AllredModel":
        get = self.getOrDefault
        mapping = get(self.inputMapping)
        columns = list(mapping) or dataset.columns
        if not get(self.exportDir):
            raise InputError("AllredEstimator: setExportDir is missing; map_fun exports the model to this directory")
        if missing := [column for column in columns if column not in dataset.columns]:
            raise InputError(f"AllredEstimator: no column {missing[0]!r} in {', '.join(dataset.columns)}")
        data, epochs = dataset.select([f"`{column.replace('`', '``')}`" for column in columns]), get(self.epochs)
        integer("AllredEstimator: epochs", epochs, 1)
        cluster = AllredCluster.run(
            dataset.sparkSession.sparkContext, self.map_fun, self.merged_args(), get(self.clusterSize),
            get(self.numPS), InputMode.SPARK, max_attempts=get(self.maxAttempts),
        )  # fmt: skip
        cluster.train(data, epochs)
        cluster.shutdown()
        model: AllredModel = self._copyValues(AllredModel())
        return model

    def merged_args(self) -> argparse.Namespace:
        """Return the args of map_fun: a copy of `args`, with the Params."""
        given = self.args if isinstance(self.args, Mapping) else vars(self.args) if self.args is not None else {}
        found = argparse.Namespace(**given)
        get = self.getOrDefault
        found.batch_size, found.epochs, found.steps = get(self.batchSize), get(self.epochs), get(self.steps)
        found.cluster_size, found.num_ps = get(self.clusterSize), get(self.numPS)
        found.model_dir, found.export_dir = get(self.modelDir), get(self.exportDir)
        found.input_mapping = get(self.inputMapping) or None
        return found


class AllredModel(Model, _ModelParams, _Saved):
    """The model that map_fun has exported; `transform` runs its predict function on the executors.

    Saved with `model.save(path)`: the Params. The exported model stays in exportDir.
    """

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(inputMapping={}, outputMapping={}, batchSize=100, exportDir="")

    def _transform(self, dataset: DataFrame) -> DataFrame:
        get = self.getOrDefault
        outputs, directory = get(self.outputMapping), get(self.exportDir)
        if not outputs or not all(len(each.split(None, 1)) == 2 for each in outputs.values()):
            raise InputError(
                "AllredModel.transform: setOutputMapping takes {name of a result: 'column TYPE'}, such as "
                f"{{'digit': 'prediction INT'}}, got {outputs!r}"
            )
        if not directory:
            raise InputError("AllredModel.transform: setExportDir names the directory of the exported model")
        added = StructType.fromDDL(", ".join(outputs.values()))
        if existing := [field.name for field in added.fields if field.name in dataset.columns]:
            raise InputError(f"AllredModel.transform: the DataFrame has a column {existing[0]!r}; name another one")
        schema = StructType([*dataset.schema.fields, *added.fields])
        columns = [pa.field(field.name, to_arrow_type(field.dataType)) for field in added.fields]
        task = _Prediction(directory, get(self.inputMapping), list(outputs), columns, get(self.batchSize))
        return dataset.mapInArrow(task.rows, schema)


class _Prediction:
    """The tasks of `transform`. names: of the results; columns: that are added, with their types."""

    def __init__(
        self, directory: str, mapping: dict[str, str], names: list[str], columns: list[pa.Field], batch_size: int
    ) -> None:
        self._directory, self._mapping, self._names, self._columns = directory, mapping, names, columns
        self._batch_size = batch_size

    def rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For DataFrame.mapInArrow."""
        predict, params = read_model(self._directory)
        for whole in batches:
            for begin in range(0, len(whole), self._batch_size):
                batch = whole.slice(begin, self._batch_size)
                found = predict(params, to_rows([batch], self._mapping or None))
                found = dict(found) if isinstance(found, Mapping) else {self._names[0]: found}
                arrays = [
                    self._column(found, name, column, len(batch))
                    for name, column in zip(self._names, self._columns, strict=True)
                ]
                names = [*batch.schema.names, *(column.name for column in self._columns)]
                yield pa.RecordBatch.from_arrays([*batch.columns, *arrays], names=names)

    def _column(self, found: Mapping[str, Any], name: str, column: pa.Field, rows: int) -> pa.Array:
        if name not in found:
            raise InputError(f"predict returned {', '.join(found)}; setOutputMapping expects {name!r}")
        values = np.asarray(found[name])
        if len(values) != rows:
            raise InputError(f"predict returned {len(values)} values of {name!r} for {rows} rows")
        array = pa.array(values if values.ndim == 1 else list(values.reshape(rows, -1)))
        try:
            return array.cast(column.type)
        except pa.ArrowException as error:
            raise InputError(
                f"predict returned {array.type} for {name!r}, and setOutputMapping names the column "
                f"'{column.name}' of type {column.type}: {error}"
            ) from None
