"""Adapters: each file lets another library save and load checkpoints of this package.

Files:

    dcp                     `torch.distributed.checkpoint.save` and `load`, by one argument
    torchft                 sends the state of a replica group to one that comes back
    torchtitan              the checkpoint manager of torchtitan's trainer, by one word on its command line
    huggingface_accelerate  Hugging Face Accelerate: `save_state` and `load_state` of an `Accelerator`
    huggingface             Hugging Face transformers: `Trainer`, and trainers made from it, such as TRL's
    hydra                   structured configs of backends, strategies, devices and settings, for Hydra applications and hydra-zen
    lightning               Lightning's Trainer: a `CheckpointIO`, a strategy for sharded state, and the random generators
"""
