"""A Spark session on loopback, without its web page."""

import os
import sys

# Executors start the Python of the tests, and nothing listens beyond loopback.
ENVIRONMENT = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}


def build(master: str, **settings: str):
    """Create a session. settings: with _ for the points in their names."""
    from pyspark.sql import SparkSession

    os.environ.update(ENVIRONMENT)
    builder = SparkSession.builder.master(master)
    always = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    given = {name.replace("_", "."): value for name, value in settings.items()}
    for name, value in {**always, **given}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session
