"""`python -m allred doctor`: finds problems and suggests commands; `python -m allred info`: versions and settings."""
