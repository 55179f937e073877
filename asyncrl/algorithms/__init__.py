"""Algorithms: which number the gradient of each token gets. `algorithm.py` says how to write one of your own."""
