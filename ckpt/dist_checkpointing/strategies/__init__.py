"""Megatron-Core's strategies, on this library's saves and loads.

Files:

    base                    the interfaces and the registry
    common                  state that is not sharded
    sharded, zarr, tensorstore, two_stage   sharded tensors
    torch                   loads of `torch_dist`
    async_utils             saves that go on beside training
"""
