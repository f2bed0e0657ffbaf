"""`python -m allred doctor`: finds problems and says what to type; `python -m allred info`: versions and settings."""
