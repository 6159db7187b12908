"""Attention over ranks of a sequence, in one process: the plans are carried out over a list of ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from twinbed.policies.layout import Border, Direction, Kind, LayerRuns
from twinbed.policies.layout.functions import SAME, results
from twinbed.policies.layout.sequence import AttentionPlans
from twinbed.policies.layout.tokens import block_pairs, seen
from twinbed.policies.mesh import SEQUENCE, Mesh
from twinbed.policies.plan import AllToAll, Apply, Plan, SendRecv, Step
from twinbed.runtime.layout import Context, attention
from twinbed.runtime.layout.functions import apply_function

B, E = 2, 8
Operands = dict[str, Tensor]


class Ranks:
    """Operands of each rank of one group. `late`: what runs beside arrives when it is waited for, else at once."""

    def __init__(self, ranks: list[Operands], *, late: bool) -> None:
        self.ranks = ranks
        self.mesh = Mesh(len(ranks), len(ranks), dims=((SEQUENCE, len(ranks)),))
        self.late = late
        self.sent = [0] * len(ranks)  # elements

    def run(self, plan: Plan) -> None:
        under_way: dict[int, list[Tensor]] = {}
        for i, step in enumerate(plan.steps):
            for waited in sorted(set(plan.dependencies(i)) & under_way.keys()):
                self._arrive(plan.steps[waited], under_way.pop(waited))
            if isinstance(step, Apply):
                self._apply(step)
                continue
            messages = [operands[step.reads[0]] for operands in self.ranks]
            if plan.is_beside(i) and self.late:
                under_way[i] = messages
            else:
                self._arrive(step, messages)
        assert not under_way, "nothing is sent that nobody waits for"

    def _apply(self, step: Apply) -> None:
        for rank, operands in enumerate(self.ranks):
            read = [operands[name] for name in step.reads]
            made = apply_function(step, Context(mesh=self.mesh, rank=rank), read)
            rules = results(step.function, [tuple(x.shape) for x in read])
            for name, tensor, rule in zip(step.writes, made, rules, strict=True):
                assert tuple(tensor.shape) == rule.shape, (step.function, name)
                wide = torch.float64 if read[0].dtype == torch.float64 else torch.float32
                assert tensor.dtype == (read[0].dtype if rule.kind == SAME else wide), (step.function, name)
                operands[name] = tensor

    def _arrive(self, step: Step, messages: list[Tensor]) -> None:
        size = len(self.ranks)
        if isinstance(step, SendRecv):
            came = [messages[(rank - step.shift) % size].clone() for rank in range(size)]
            self.sent = [sent + m.numel() for sent, m in zip(self.sent, messages, strict=True)]
        else:
            assert isinstance(step, AllToAll)
            parts = [message.chunk(size, step.dim) for message in messages]
            came = [torch.cat([p[rank] for p in parts], step.into_dim) for rank in range(size)]
            away = [m.numel() * (size - 1) // size for m in messages]
            self.sent = [sent + elements for sent, elements in zip(self.sent, away, strict=True)]
        for operands, tensor in zip(self.ranks, came, strict=True):
            operands[step.writes[0]] = tensor


def whole_attention(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, *, causal: bool) -> dict[str, Tensor]:
    """Output and gradients of one device, by torch's autograd through plain softmax."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(repeats, 1) for x in (k, v))
    scores = q @ keys.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    y = scores.softmax(-1) @ values
    y.backward(dy)
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return {"y": y.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def run_over_ranks(
    plans: AttentionPlans, whole: Operands, *, causal: bool, late: bool
) -> tuple[Operands, list[int], list[int]]:
    """(output and gradients of the whole sequence, elements sent by each rank forward, and backward)."""
    tokens, size = whole["q"].shape[2], plans.size
    places = [
        torch.cat([torch.arange(start, end) for start, end in plans.token_runs(tokens, rank)])
        for rank in range(size)
    ]
    given = [{name: x[:, :, own].contiguous() for name, x in whole.items() if name != "dy"} for own in places]
    forward, backward = (
        plans.plan(LayerRuns(Kind.attention, direction, Border(), number=int(causal)))
        for direction in (Direction.forward, Direction.backward)
    )
    assert forward is not None
    assert backward is not None
    there = Ranks(given, late=late)
    there.run(forward)
    kept = [
        {name: x for name, x in operands.items() if name in backward.operands} for operands in there.ranks
    ]
    for operands, own in zip(kept, places, strict=True):
        operands["dy"] = whole["dy"][:, :, own]
    back = Ranks(kept, late=late)
    back.run(backward)
    found = {}
    for name, ranks in (("y", there.ranks), *((name, back.ranks) for name in ("dq", "dk", "dv"))):
        found[name] = torch.empty_like(whole["dy"] if name in ("y", "dq") else whole["k"])
        for operands, own in zip(ranks, places, strict=True):
            found[name][:, :, own] = operands[name]
    return found, there.sent, back.sent


def make_whole(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype, *, seed: int = 0) -> Operands:
    random = torch.Generator().manual_seed(seed)
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads, "dy": heads}
    return {
        name: torch.randn(B, h, tokens, E, generator=random, dtype=torch.float64).to(dtype)
        for name, h in sizes.items()
    }


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("causal", "zigzag"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_equals_one_device(size: int, causal: bool, zigzag: bool, kv_heads: int, late: bool) -> None:
    whole = make_whole(tokens := 12 * size, 4, kv_heads, torch.float64)
    plans = AttentionPlans("ring", size=size, zigzag=zigzag)
    found, sent, sent_back = run_over_ranks(plans, whole, causal=causal, late=late)
    for name, wanted in whole_attention(**whole, causal=causal).items():
        assert error(found[name], wanted) < 1e-12, name
    unit = B * kv_heads * (tokens // size) * E  # B Z (L/N) A
    assert sent == [2 * (size - 1) * unit] * size
    assert sent_back == [4 * (size - 1) * unit] * size


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [12, 6])  # 2, 3 and 6 ranks divide them
@pytest.mark.parametrize("size", [2, 3])
def test_ulysses_equals_one_device(size: int, kv_heads: int, causal: bool) -> None:
    whole = make_whole(tokens := 12 * size, 12, kv_heads, torch.float64)
    found, sent, sent_back = run_over_ranks(
        AttentionPlans("ulysses", size=size), whole, causal=causal, late=False
    )
    for name, wanted in whole_attention(**whole, causal=causal).items():
        assert error(found[name], wanted) < 1e-12, name
    head = B * (tokens // size) * E
    assert sent == sent_back == [(12 + 12 + 2 * kv_heads) * head * (size - 1) // size] * size


def test_zigzag_and_contiguous_give_the_same_in_bf16_and_fp32() -> None:
    """bf16: the merge and dq are added up in fp32, so that more ranks do not cost digits."""
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        whole = make_whole(64, 4, 2, dtype, seed=1)
        wanted = whole_attention(**{name: x.double() for name, x in whole.items()}, causal=True)
        for size, zigzag in ((1, False), (4, True), (4, False)):
            if size == 1:
                y, sums = attention.attention(whole["q"], whole["k"], whole["v"], causal=True)
                q, k, v = (whole[name] for name in "qkv")
                made = attention.attention_gradient(whole["dy"], q, k, v, y, sums, causal=True)
                found = dict(zip(("y", "dq", "dk", "dv"), (y, *made), strict=True))
            else:
                plans = AttentionPlans("ring", size=size, zigzag=zigzag)
                found, *_ = run_over_ranks(plans, whole, causal=True, late=True)
            for name, exact in wanted.items():
                assert error(found[name], exact) < limit, (dtype, size, zigzag, name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(7, 7, True), (7, 7, False), (5, 10, False), (10, 5, False), (1, 1, True)]
)
def test_kernels_equal_their_reference(dtype: torch.dtype, queries: int, keys: int, causal: bool) -> None:
    """Sums and output from outside too, as if there were more keys elsewhere."""
    random = torch.Generator().manual_seed(queries * keys)
    q, dy, k, v = (
        torch.randn(B, 4, length, E, generator=random, dtype=torch.float64).to(dtype)
        for length in (queries, queries, keys, keys)
    )
    limit = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    y, sums = attention.attention(q, k, v, causal=causal)
    wanted_y, wanted_sums = attention.reference(q, k, v, causal=causal)
    assert sums.dtype == wanted_sums.dtype
    assert error(y, wanted_y) < limit
    assert error(sums, wanted_sums) < min(limit, 1e-6)  # not rounded to bf16
    y, sums = y * 0.7, sums + 0.4
    found = attention.attention_gradient(dy, q, k, v, y, sums, causal=causal)
    wanted = attention.reference_gradient(dy, q, k, v, y, sums, causal=causal)
    for made, exact in zip(found, wanted, strict=True):
        assert error(made, exact) < 2 * limit


@pytest.mark.parametrize("zigzag", [True, False])
def test_only_what_is_seen_is_computed(monkeypatch: pytest.MonkeyPatch, zigzag: bool) -> None:
    """The scores that kernels are called for are those that `block_pairs` tells the simulator, forward and backward."""
    counted: list[float] = []
    for name, number in (("attention", 0), ("attention_gradient", 1)):
        kernel = getattr(attention, name)

        def counting(*operands: Tensor, causal: bool, kernel: Any = kernel, number: int = number) -> Any:
            q, k = operands[number : number + 2]
            assert not causal or q.shape[2] == k.shape[2]
            counted.append(q.shape[2] * k.shape[2] * (0.5 if causal else 1.0))
            return kernel(*operands, causal=causal)

        monkeypatch.setattr(attention, name, counting)
    size, tokens = 4, 6
    whole = make_whole(tokens, 4, 2, torch.float32)
    kv = torch.stack((whole["k"], whole["v"]))
    for rank in range(size):
        for step in range(size):
            counted.clear()
            where: dict[str, Any] = {
                "size": size,
                "rank": rank,
                "step": step,
                "causal": True,
                "zigzag": zigzag,
            }
            part = seen(**where)
            y, sums = attention.attention_block(whole["q"], kv, part)
            attention.attention_block_gradient(whole["dy"], whole["q"], kv, y, sums, part)
            expected = block_pairs(**where) * tokens**2
            assert counted == ([expected] * 2 if expected else [])
