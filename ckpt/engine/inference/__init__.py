"""Weights for the worker processes of an inference engine.

Files, in the order in which data travels:

    inference_requests      the HTTP requests that make servers load weights
    vllm_servers, vllm      updates of vLLM's servers by their trainers, and vLLM's plug-in, whose workers are rollouts
    vllm_adapter            an adapter alone, on a worker of vLLM
    worker_line             the protocol of checkpoint-engine with one worker process
    inference               the sink (it loads received weights) for all workers of that protocol
"""
