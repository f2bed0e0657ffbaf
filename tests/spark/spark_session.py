"""A Spark session on loopback, without its web page."""

import os
import sys

# Executors start the Python of the tests, and nothing listens beyond loopback. Java uses only its first compiler,
# because the programs are short: a driver of test_clusters.py took 21 s instead of 26 s.
ENVIRONMENT = {
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
    "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def build(master: str, **settings: str):
    """Create a session. settings: with _ for the points in their names."""
    from pyspark.sql import SparkSession

    os.environ.update({**ENVIRONMENT, **os.environ})
    builder = SparkSession.builder.master(master)
    host = os.environ["SPARK_LOCAL_IP"]
    always = {"spark.ui.enabled": "false", "spark.driver.host": host, "spark.driver.bindAddress": host}
    given = {name.replace("_", "."): value for name, value in settings.items()}
    for name, value in {**always, **given}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session
