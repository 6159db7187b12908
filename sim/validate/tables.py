"""What the tables of published rows are, and what had to be chosen because it was not published."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    free_choices: tuple[str, ...] = ()  # not published, chosen by us
    notes: tuple[str, ...] = ()


_SHAPES = "hidden 12288 with 27, 50 and 76 layers for 49B, 91B and 138B: one number, and the depths that give the sizes"
_SEQUENCE = "sequences of 512 tokens (of the tutorial); 1K and 2K tokens are 2 and 4 of them"

_BERT = (
    "BERT-Large: its 24 layers divide by 8; its vocabulary padded to 30720, which divides by all groups",
    "fp16, dropout and attention of two products, as in ColossalAI-Examples; and 8 micro-batches, where it has 4: "
    "torch's pipelines, which are simulated, want one a stage",
)
_GPT3 = (
    "A100 40 GB at 1555 GB/s (memory of 36-40 GB points to it), 8 a node, 8 HDR links",
    "96 GPUs: tensor 4 x pipeline 24",
)

# In the order in which they are printed; a table that is not here comes last and has its name for a title.
TABLES: dict[str, Table] = {
    "zeropp": Table(
        "ZeRO++ on 384 V100: TFLOP/s per GPU by link count (arXiv 2306.10209)",
        (
            _SHAPES,
            _SEQUENCE,
            "DeepSpeed's default limits, and reduce_bucket_size 1e7 of the tutorial",
        ),
        (
            "the model's form (what overlaps what, 4 links as 8/3) was chosen with all cells in sight: only the "
            "constants are held out",
        ),
    ),
    "zeropp_speedup": Table(
        "ZeRO++ over ZeRO-3, from the same cells",
        (_SHAPES, _SEQUENCE),
        ("a speed-up whose ZeRO-3 cell was fitted counts as fitted",),
    ),
    "zeropp_equality": Table("ZeRO++ at 200 Gb/s over ZeRO-3 at 800 Gb/s, 2K tokens", (_SHAPES, _SEQUENCE)),
    "zeropp_single": Table(
        "One technique at a time, over ZeRO-3: 18B, 128 GPUs, 1 link (third party)",
        ("1K tokens: the setting is not certain",),
        ("a review lists three speed-ups without saying surely which is which: shown, never gated",),
    ),
    "megatron": Table(
        "Megatron-LM on A100, tensor and pipeline parallel: seconds an iteration (arXiv 2205.05198, Table 5)"
    ),
    "torchtitan": Table(
        "torchtitan FSDP2 on 64 A100: tokens/s per GPU (docs/performance.md, 2024)",
        ("the network between nodes: that of AWS p4de, 4 EFA links of 100 Gb/s",),
        (
            "the launch script of torchtitan names EFA for its A100s, but it was looked for after a DGX A100's network "
            "(8 HDR links) had given a mean error of 10.0%; mechanisms were added with the errors in sight, no number "
            "was fitted",
        ),
    ),
    "gpt3_press": Table(
        "GPT-3 175B, Colossal-AI's press figure: seconds an iteration",
        _GPT3,
        (
            "layout of 128 GPUs from the benchmark repository; what makes Colossal-AI faster there is not said",
        ),
    ),
    "gpt3_memory": Table("The same: memory of a GPU", _GPT3, ("printed without decimals",)),
    "sequence_speed": Table(
        "BERT with tensor or sequence parallelism, pipeline 8, one P100 a node (arXiv 2105.13120)",
        _BERT,
        (
            "with these errors in sight: 8 micro-batches, and that torch's fp16 products run at the rate of fp32 on a "
            "P100; the bandwidth between nodes was fitted on the row in which communication weighs most",
        ),
    ),
    "sequence_memory": Table(
        "The same: memory of a GPU",
        _BERT,
        ("8 GPUs in a tensor group ran out of memory in the paper", "MB taken as 1e6 bytes"),
    ),
    "hpz_memory": Table(
        "Memory of hpZ: 100B parameters on 1024 GPUs, groups of 16",
        ("a shape of 99.999 billion parameters: 55 layers of 12288, vocabulary 26624",),
    ),
}


def table_of(name: str) -> Table:
    return TABLES.get(name, Table(name))


def in_order(names: Iterable[str]) -> list[str]:
    known = list(TABLES)
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))
