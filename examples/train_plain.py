"""Trains a GPT of twinbed on the source of Python's argparse, byte by byte."""

import argparse
import inspect
from collections.abc import Sequence

import torch

from twinbed.conf.model_spec import ModelSpec
from twinbed.runtime.stack import build_model

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
    spec = ModelSpec(
        name="plain",
        family="gpt",
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        kv_heads=args.heads,
        ffn=4 * args.hidden,
        vocab=END + 1,
        sequence=args.tokens,
        tied_embeddings=False,
        head="lm",
    )
    model = build_model(spec, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    words = torch.tensor([*inspect.getsource(argparse).encode(), END])
    random = torch.Generator().manual_seed(1)
    losses = []
    for step in range(args.steps):
        starts = torch.randint(len(words) - args.tokens - 1, (args.batch,), generator=random)
        rows = torch.stack([words[start : start + args.tokens + 1] for start in starts])
        loss = model(rows[:, :-1], rows[:, 1:])
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
