"""Weights for the worker processes of an inference engine.

Files, in the order in which data travels:

    inference_requests      the HTTP requests that make servers load weights
    worker_line             the protocol with one worker process
    inference               the sink (it loads received weights) for all workers
"""
