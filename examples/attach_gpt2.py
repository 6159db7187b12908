"""A Hugging Face GPT-2 in a loop of one's own, with ZeRO++ between the ranks.

    torchrun --nproc-per-node=4 examples/attach_gpt2.py zeropp

The model is built from a config, so nothing is downloaded. What twinbed adds are the two lines marked below. On one
machine LOCAL_WORLD_SIZE says that all ranks share a node; RANKS_PER_NODE=2 pretends two nodes of two.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import twinbed.runtime  # 1

STEPS = 10


def main() -> None:
    policy = sys.argv[1] if len(sys.argv) > 1 else "zeropp"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=256)
    model = GPT2LMHeadModel(config).to(device)

    mesh = init_device_mesh(device, (world,))
    wire = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=wire)
    fully_shard(model, mesh=mesh, mp_policy=wire)
    attached = twinbed.runtime.attach(  # 2
        model, policy, ranks_per_node=int(os.environ.get("RANKS_PER_NODE", os.environ["LOCAL_WORLD_SIZE"]))
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 256, (2, 64), generator=generator).to(device)
    for step in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if rank == 0:
        for warning in attached.warnings:
            print(f"warning: {warning}")
        wire_bytes = sum(row.wire_bytes for row in attached.ledger.rows)
        print(f"{attached.policy.name}: rank 0 sent {wire_bytes:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
