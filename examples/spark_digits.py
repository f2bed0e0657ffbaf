"""Handwritten digits (the 1797 real scans that scikit-learn ships) in a Spark DataFrame: an Estimator and its Model.

    spark-submit --master 'local[2]' examples/spark_digits.py     Spark in this process, two workers
    spark-submit --master ... examples/spark_digits.py /shared    a cluster; /shared: a directory that all nodes share

It needs Java and pip install '/path/to/clone[mpich,spark,examples]'. The last line is

    test accuracy: 0.9...
"""

import sys
import tempfile

from pyspark.sql import SparkSession

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None

from allred.spark.ml import AllredEstimator


def predict(params, inputs):
    return (inputs["x"] @ params["weight"] + params["bias"]).argmax(axis=1)


def train(args, ctx):
    """Softmax regression, by each worker on its rows; the gradients are averaged."""
    import numpy as np

    import allred

    allred.init()
    params = {"weight": np.zeros((64, 10)), "bias": np.zeros(10)}
    opt = allred.distributed(allred.optim.Adagrad(lr=args.lr))
    opt.broadcast(params)
    feed = ctx.get_data_feed(input_mapping=args.input_mapping)
    while not feed.should_stop():
        batch = feed.next_batch(args.batch_size)
        x, y = batch["x"], batch["y"]
        z = np.exp(x @ params["weight"] + params["bias"])
        error = (z / z.sum(axis=1, keepdims=True) - np.eye(10)[y]) / len(x)
        opt.step(params, {"weight": x.T @ error, "bias": error.sum(axis=0)}, samples=len(x))
    ctx.export_model(args.export_dir, predict, params)


def main():
    spark = SparkSession.builder.appName("digits").getOrCreate()
    images, labels = load_digits(return_X_y=True)
    rows = [((image / 16).tolist(), int(label)) for image, label in zip(images, labels, strict=True)]
    frame = spark.createDataFrame(rows, "pixels ARRAY<DOUBLE>, digit INT").repartition(4)
    training, test = frame.randomSplit([0.8, 0.2], seed=0)

    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as directory:
        estimator = AllredEstimator(train, {"lr": 0.1}).setInputMapping({"pixels": "x", "digit": "y"}).setClusterSize(2)
        estimator.setEpochs(20).setBatchSize(50).setExportDir(directory)
        model = estimator.fit(training)
        predicted = model.setInputMapping({"pixels": "x"}).setOutputMapping({"digit": "prediction INT"}).transform(test)
        accuracy = predicted.selectExpr("avg(int(prediction = digit))").first()[0]
    print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
