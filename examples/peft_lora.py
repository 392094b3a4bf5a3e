"""An adapter (LoRA) under FSDP2: its checkpoints hold the adapter and its optimizer, and know the base by its digest.

pip install -e '.[huggingface]' peft
torchrun --standalone --nproc-per-node 2 examples/peft_lora.py
torchrun --standalone --nproc-per-node 3 examples/peft_lora.py --steps 80
ckpt convert outputs/peft_lora/checkpoint-00000080 adapter --to safetensors --component adapter-default    # for PeftModel.from_pretrained
"""

import argparse

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="outputs/peft_lora")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # in place of LlamaForCausalLM.from_pretrained: every start has the same base
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    adapter = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"])
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), adapter)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)

    with Checkpointer(
        args.folder, model=model, optimizer=optimizer, peft_base="frozen", every=20, keep_last=3, mode="async"
    ) as checkpoints:
        start = checkpoints.restore()
        for step in range(start + 1, args.steps + 1):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            tokens = (torch.randint(-2, 3, (4, 32), generator=generator).cumsum(1) + step) % 64
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoints.step(step)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
