"""Weights for the worker processes of an inference engine.

Files, in the order in which data travels:

    inference_requests      how servers are asked to take weights
    worker_line             what is said to one worker
    inference               the outlet that an engine writes to
"""
