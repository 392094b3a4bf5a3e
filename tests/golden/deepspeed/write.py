"""Write the golden checkpoints beside this file with the real DeepSpeed, in an environment of its own, with a compiler of C++:

    python3.11 -m venv deepspeed-env
    deepspeed-env/bin/pip install deepspeed==0.19.8 torch==2.13.0 ninja
    PATH=$PWD/deepspeed-env/bin:$PATH python -m tests.golden.deepspeed.write

    stage1, stage3      two data parallel ranks train in bfloat16 with ZeRO of this stage; its values are replaced by those of `contents`,
                        the engine saves, and deepspeed.checkpoint.ds_to_universal converts

If it hangs, a killed run has left its lock in the folder of torch's extensions: give TORCH_EXTENSIONS_DIR an empty one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
RANKS = 2
HERE = Path(__file__).parent


def train(rank: int, folder: str, stage: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29613")
    import deepspeed
    import torch
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    from tests.golden.deepspeed.contents import STEPS, Net, fill_the_rest, groups_of, values

    net = Net()
    wanted = values(net)
    fill_the_rest(net)  # ZeRO of stage 3 keeps parts of parameters from here on
    optimizer = torch.optim.AdamW(groups_of(net), lr=0.25)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=schedule, config=config, dist_init_required=True
    )
    for _ in range(STEPS):
        engine.backward(engine(torch.arange(4) + rank))
        engine.step()
    if stage < 3:  # it links the optimizer's state after the first group's first step, before other groups have one
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, one in wanted.items():
        parameter = engine.module.get_parameter(name)
        for kind, value in one.items():
            if stage == 3:
                side = -(-value.numel() // RANKS)
                part = torch.nn.functional.pad(value.flatten(), (0, RANKS * side - value.numel()))[rank * side :][:side]
                parameter._z3_optimizer.set_local_hp_param(part, parameter, None if kind == "fp32" else kind)
            elif kind == "fp32":
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, kind)
    fresh = Net()
    fill_the_rest(fresh)
    for one, value in zip(engine.module.buffers(), fresh.buffers(), strict=True):
        one.copy_(value)
    engine.save_checkpoint(folder, tag="global_step3")


def write(stage: int) -> None:
    import torch.multiprocessing
    from deepspeed.checkpoint import ds_to_universal

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (folder, stage), nprocs=RANKS)
        out = HERE / f"stage{stage}" / "global_step3_universal"
        shutil.rmtree(out.parent, ignore_errors=True)
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=f"{folder}/global_step3", output_folder=str(out), inject_missing_state=True, **options
            )
        )


if __name__ == "__main__":
    for one in sys.argv[1:] or ("1", "3"):
        write(int(one))
