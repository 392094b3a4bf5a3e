"""Checkpoints of other programs, loaded like those of this package: the tensors' bytes are read where they lie, and nothing is unpickled
that could run code.

Files:

    other_checkpoint        what each format here is read as: tensors that are raw bytes at known places in files, or are decoded
    torch_archives          tensors and values in the archives that `torch.save` writes: their places, and their types
    dcp_folders             checkpoints of `torch.distributed.checkpoint`
    megatron_folders        checkpoints of Megatron-Core's `torch_dist`: one of DCP, and `common.pt`
    deepspeed_folders       universal checkpoints of DeepSpeed, of ZeRO stages 1 to 3
    orbax_folders           checkpoints of Orbax, JAX's library: OCDBT databases or folders of Zarr arrays
    hub_folders             folders of Hugging Face's: which file holds the weights
    torch_files             one file of `torch.save`, or several with an index
    safetensors_files       one safetensors file, or several with an index
    other_source            what such a checkpoint holds of a component
    recognised              what is at a path that holds no checkpoint that is read
"""
