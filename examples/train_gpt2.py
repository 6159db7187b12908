"""Trains a GPT-2 of transformers on the source of Python's argparse, byte by byte; blanks are read, but not learned."""

import argparse
import inspect
from collections.abc import Sequence

import torch
from transformers import GPT2Config, GPT2LMHeadModel

END = 256  # a word beside the bytes


def train(argv: Sequence[str] | None = None) -> list[float]:
    """The loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--log-every", type=int, default=5, help="steps")
    parser.add_argument("--save", help="file for the weights")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=END + 1,
        n_positions=args.tokens,
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=args.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    words = torch.tensor([*inspect.getsource(argparse).encode(), END])
    random = torch.Generator().manual_seed(1)
    losses = []
    for step in range(args.steps):
        starts = torch.randint(len(words) - args.tokens, (args.batch,), generator=random)
        ids = torch.stack([words[start : start + args.tokens] for start in starts])
        labels = ids.masked_fill(ids == ord(" "), -100)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % args.log_every == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    if args.save:
        torch.save(model.state_dict(), args.save)
    return losses


if __name__ == "__main__":
    train()
