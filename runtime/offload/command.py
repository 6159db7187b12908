"""The command `twinbed-generate`: text from a trained checkpoint, also of a model larger than memory."""

import argparse
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from ...conf.model_spec import ModelSpec
from ...conf.schema import OffloadConf, OffloadKind
from ..checkpoint import find_checkpoint

_STORE = "weights"
_OPTIONS = {"offload.memory_bytes": "--memory-bytes", "offload.activations": "--activations"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command `twinbed-generate`: go on with a text, by the weights of a checkpoint."""
    arguments = _parser().parse_args(argv)
    try:
        _generate(arguments)
    except (ValueError, RuntimeError, OSError) as err:
        said = str(err)
        for key, option in _OPTIONS.items():
            said = said.replace(f"{key}=", f"{option} ")
        sys.stderr.write(f"twinbed-generate: {said}\n")
        return 1
    return 0


def _generate(arguments: argparse.Namespace) -> None:
    checkpoint = find_checkpoint(arguments.checkpoint, "CHECKPOINT")
    values: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in checkpoint.model.items()
    }
    spec = ModelSpec(**values)
    if spec.family != "gpt":
        raise ValueError(
            f"the checkpoint's model is of family {spec.family!r}: only a gpt goes on with a text"
        )
    if spec.vocab < 256:
        raise ValueError(f"the checkpoint's model has vocab={spec.vocab}: must be >= 256, for text is bytes")
    if arguments.tokens < 1:
        raise ValueError(f"--tokens {arguments.tokens}: must be >= 1")
    if not arguments.prompt:
        raise ValueError("--prompt '': must be at least one character")
    if not 0 <= arguments.temperature < inf:
        raise ValueError(f"--temperature {arguments.temperature}: must be a finite number >= 0")
    if arguments.memory_bytes is not None and arguments.offload == "none":
        raise ValueError("--memory-bytes needs --offload disk: without it all weights are in memory")
    offload = OffloadConf(
        name=arguments.offload,
        policy=OffloadKind(arguments.policy),
        memory_bytes=arguments.memory_bytes,
        activations=arguments.activations,
        prefetch=arguments.prefetch,
    )
    from .generate import Generator, import_weights

    folder = arguments.store or checkpoint.folder / _STORE
    try:
        store = import_weights(checkpoint, spec, folder)
    except OSError as err:
        raise ValueError(f"--store {folder}: cannot be made or written to: {err.strerror}") from err
    try:
        tokens = Generator(spec, store, offload).generate(
            arguments.prompt.encode(),
            arguments.tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
    finally:
        store.close()
    text = bytes(token for token in tokens if token < 256).decode(errors="replace")
    sys.stdout.write(f"{arguments.prompt}{text}\n")


def _bytes(text: str) -> float:
    try:
        return float(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes (10 MB is 10e6)") from err


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinbed-generate",
        description="Go on with a text by the weights of a checkpoint. With --offload disk the layers are read one "
        "after the other as they compute, so that the model need not fit into memory.",
    )
    parser.add_argument("checkpoint", type=Path, help="a step_<n> folder, or a run's folder for its latest")
    parser.add_argument("--prompt", default="\n", help="the text to go on with; default: a new line")
    parser.add_argument("--tokens", type=int, default=64, help="how many to add; default: 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default): the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of the draws; default: 0")
    parser.add_argument("--offload", choices=["none", "disk"], default="disk", help="default: disk")
    parser.add_argument(
        "--policy", choices=["static", "auto"], default="static", help="of what stays in memory"
    )
    parser.add_argument("--memory-bytes", type=_bytes, help="for weights and activations; default: no limit")
    parser.add_argument(
        "--activations", type=float, default=0.3, help="share of it that weights leave free; default: 0.3"
    )
    parser.add_argument("--prefetch", type=int, default=1, help="layers read ahead; default: 1")
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help=f"for the weights as files; default: {_STORE} in the checkpoint",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
