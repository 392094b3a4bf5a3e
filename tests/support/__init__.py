"""What tests share: ranks, states, servers, stand-ins. No file here holds tests of its own, but for the contract of backends.

Files:

    anonymous_memory        the most memory that code takes on top
    arrays                  arrays saved by some ranks, read back
    async_runs              saves in the background, and what befalls them
    backend_contract        the tests that every storage format passes
    bounded                 limits on memory, and bombs
    covering                pairs of parameters in place of all combinations
    crafts                  committed checkpoints, changed and signed again
    cuts                    how a global tensor may lie on ranks
    dcp_runs                states saved by torch.distributed.checkpoint
    doc_scripts             the scripts that write parts of the handbook
    engines                 weight sync between ranks
    faults                  one fault of one rank at any phase
    forked_ranks            ranks forked from a process with a slow framework
    frozen                  a store that hangs
    hash_seeds              all saves and loads under one hash seed
    incremental_saves       saves that link to the one before
    jobs                    jobs that tests launch
    leaks                   what a case left behind in its process
    lightning_runs          trainings by Lightning
    mutation                how many small faults the tests find
    object_server           S3 and Google Cloud Storage on loopback, with faults
    object_writers          runs that save into a store and are killed
    pace                    deadlines of a slow machine
    pages                   the pages of recipes
    peft_runs               trainings of adapters of a tiny Llama
    plain_safetensors       safetensors files without this library
    ranks                   real ranks for the whole test run
    real_stores             moto, SeaweedFS and azurite on loopback
    sharded_saves           strategies and states of `ckpt.save`
    stand_in_vllm           the classes of vLLM that the plug-in takes
    states                  states and coordinators of whole saves
    store_benchmark         seconds in an object store, beside others
    stored_path             addresses in object stores with methods of Path
    tilings                 hypothesis strategies for shapes and boxes
    trained_models          tiny models of transformers, whole and cut over ranks
    trainers                a program of Hugging Face's Trainer
    users                   people of one Unix group in one folder
    values                  equal in type and to the bit?
    versions                the tests with other versions of dependencies
"""
