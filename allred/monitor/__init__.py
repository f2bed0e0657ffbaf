"""Shows a running job: `python -m allred top`, and the metrics for Prometheus."""
