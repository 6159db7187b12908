"""Token generation with layers streamed from a store: the model may be larger than memory."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...conf.model_spec import ModelSpec
from ...conf.schema import OffloadConf
from ...policies.offload import Kind, OffloadAction, OffloadEvent, build_offload, cut_chunks
from ..checkpoint import Checkpoint
from ..model import GPT, Block, Past
from .header import Layout, lay_out
from .manifest import StoreError, committed_generations, remove_store, stored_identity
from .region import Region
from .residency import Residency
from .store import Store

ROOT = "root"


class Generator:
    """A model whose units come near when they compute, by an offload policy.

    Args:
        spec: Of family "gpt".
        store: With the weights of each unit as entry "parameters/<unit>", as `import_weights` makes it.
        conf: Which units stay near, and how many are fetched ahead. Inactive: all are near.

    Attributes:
        decisions: What the policy was told, and what it answered.
    """

    def __init__(self, spec: ModelSpec, store: Store, conf: OffloadConf) -> None:
        self.spec = spec
        self.decisions: list[tuple[OffloadEvent, tuple[OffloadAction, ...]]] = []
        with torch.device("meta"):
            self._model = GPT(spec, seed=None).requires_grad_(False)
        self._regions = {unit: Region(layout) for unit, layout in unit_layouts(spec).items()}
        _assign(self._model, self._regions)
        sizes = {unit: region.layout.nbytes for unit, region in self._regions.items()}
        policy = build_offload(conf, cut_chunks(sizes, Kind.parameters))
        self._residency: Residency | None = None
        near = list(self._regions)
        if policy is not None:
            chunks = {_entry(unit): region for unit, region in self._regions.items()}
            self._residency = Residency(
                policy, store, chunks, log=self._note, wait=_no_clock, moved=_no_timeline
            )
            near = [unit for unit in near if policy.stays(_entry(unit))]
        for unit in near:
            store.read(_entry(unit), self._regions[unit]).result()

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[int]:
        """The tokens that follow `prompt`.

        Args:
            prompt: At least one token.
            num_tokens: To add.
            temperature: 0: always the likeliest token; else they are drawn.
            seed: Of the draws.

        Raises:
            ValueError: There is no prompt, a token is not in the vocabulary, or the model has too few positions.
        """
        longest = len(prompt) + num_tokens
        if not prompt or min(prompt) < 0 or max(prompt) >= self.spec.vocab:
            raise ValueError(f"the prompt must be tokens in [0, {self.spec.vocab}), at least one")
        if longest > self.spec.sequence:
            raise ValueError(
                f"{len(prompt)} tokens of a prompt and {num_tokens} to add are more than the {self.spec.sequence} "
                "positions of the model (model.sequence)"
            )
        draws = torch.Generator().manual_seed(seed)
        pasts = [
            Past(
                batch=1,
                num_key_heads=self.spec.kv_heads,
                head_size=self.spec.head_dim,
                max_tokens=longest,
            )
            for _ in range(self.spec.layers)
        ]
        found: list[int] = []
        given, first = list(prompt), 0
        for _ in range(num_tokens):
            logits_V = self._next_logits(torch.tensor([given]), first, pasts)
            if temperature > 0:
                chances_V = torch.softmax(logits_V / temperature, dim=-1)
                token = int(torch.multinomial(chances_V, 1, generator=draws))
            else:
                token = int(logits_V.argmax())
            found.append(token)
            first += len(given)
            given = [token]
        return found

    def _next_logits(self, tokens_BT: Tensor, first: int, pasts: Sequence[Past]) -> Tensor:
        if self._residency is not None:
            self._residency.begins("generate")
        with self._near(ROOT):
            x_BTD = self._model.embed(tokens_BT, first)
        for i, (block, past) in enumerate(zip(self._model.blocks, pasts, strict=True)):
            assert isinstance(block, Block)
            with self._near(f"block.{i}"):
                x_BTD = block(x_BTD, past)
        with self._near(ROOT):
            return self._model.logits(x_BTD[:, -1:])[0, -1].float()

    @contextmanager
    def _near(self, unit: str) -> Iterator[None]:
        if self._residency is None:
            yield
            return
        self._residency.needed(_entry(unit))
        yield
        self._residency.released(_entry(unit), changed=False)

    def _note(self, event: OffloadEvent, actions: tuple[OffloadAction, ...]) -> None:
        self.decisions.append((event, actions))


def unit_layouts(spec: ModelSpec) -> dict[str, Layout]:
    """The weights of each unit, by name within the model, fp32."""
    with torch.device("meta"):
        model = GPT(spec, seed=None)
    return {
        unit: lay_out({name: (p.dtype, tuple(p.shape)) for name, p in own.items()})
        for unit, own in _own_parameters(model).items()
    }


def import_weights(checkpoint: Checkpoint, spec: ModelSpec, folder: Path) -> Store:
    """The weights of a checkpoint in a store that generation streams from; made once, one unit at a time.

    Args:
        folder: Of the store. If it holds the weights of another checkpoint, or of what this one was before, they are
            replaced.

    Raises:
        StoreError: It holds a store of something else, or the disk is too small.
        DamagedError: It is damaged.
        RuntimeError: The checkpoint cannot be read.
    """
    layouts = {_entry(unit): layout for unit, layout in unit_layouts(spec).items()}
    # A folder may be moved, and be trained into again: the files tell, and not their path
    files = {name: (checkpoint.folder / name).stat() for name in sorted(checkpoint.files)}
    identity = {
        "weights_of": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()},
        "step": checkpoint.step,
        "model": asdict(spec),
    }
    if committed_generations(folder):
        found = stored_identity(folder)
        if found.keys() != identity.keys():
            raise StoreError(f"{folder} holds a store of a training: give another folder")
        if found == json.loads(json.dumps(identity)):
            return Store.open(folder, layouts, identity, shared=True)
        remove_store(folder)
    store = Store.create(folder, layouts, identity, num_slots=1)
    try:
        for entry, layout in layouts.items():
            region = Region(layout)
            _read_weights(checkpoint, dict(region.tensors))
            store.write(entry, region, release=True).result()
        store.commit({"step": checkpoint.step})
    except BaseException:
        store.remove()
        raise
    return store


def _read_weights(checkpoint: Checkpoint, weights: dict[str, Tensor]) -> None:
    """Fill these tensors from the checkpoint; whole, however it was sharded."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():  # that one process reads alone, which is meant
            warnings.filterwarnings("ignore", message=".*torch.distributed.*", category=UserWarning)
            load({"model": weights}, checkpoint_id=checkpoint.folder, no_dist=True)
    except CheckpointException as err:
        failure = next(iter(err.failures.values()))[0]
        raise RuntimeError(f"checkpoint {checkpoint.folder} cannot be read: {failure}") from err


def _assign(model: GPT, regions: Mapping[str, Region]) -> None:
    for unit, own in _own_parameters(model).items():
        for name in own:
            where, _, attribute = name.rpartition(".")
            weight = nn.Parameter(regions[unit].tensors[name], requires_grad=False)
            setattr(model.get_submodule(where), attribute, weight)


def _own_parameters(model: GPT) -> dict[str, dict[str, nn.Parameter]]:
    """Of each unit, without those of units within it."""
    units = model.units()
    inside = {id(p): unit for unit, m in units.items() if unit != ROOT for p in m.parameters()}
    own: dict[str, dict[str, nn.Parameter]] = {unit: {} for unit in units}
    for name, parameter in model.named_parameters():
        own[inside.get(id(parameter), ROOT)][name] = parameter
    return own


def _entry(unit: str) -> str:
    return f"{Kind.parameters.value}/{unit}"


def _no_clock(what: str, nbytes: int) -> AbstractContextManager[Any]:
    return nullcontext()


def _no_timeline(stream: str, name: str, start_ns: int, end_ns: int, nbytes: int) -> None:
    pass
