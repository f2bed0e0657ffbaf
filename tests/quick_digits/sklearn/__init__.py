"""In PYTHONPATH: the digits of scikit-learn without its import, which takes 1.6 s of CPU time of each rank."""
