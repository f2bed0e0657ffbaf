"""`python -m allred doctor`: what is good here and what is not, and what to type. And `python -m allred info`."""
