"""Upstream's strategies, on this package's engine.

Files, in the order in which data travels:

    base                    the interfaces and the registry
    common                  what is not sharded
    sharded, zarr, tensorstore, two_stage   what is sharded
    async_utils             saves that go on while training does
"""
