"""Memory of model states as DeepSpeed's own estimator counts it, from a Hugging Face config.

Run: python -m twinbed.sim.deepspeed.estimator CONFIG_JSON --gpus N
"""

import argparse
import sys
from collections.abc import Sequence

from ...conf.hf import read_hf_config
from ...conf.model_spec import num_parameters
from ..memory import Convention
from .modules import largest_module


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: bytes a GPU with nothing, the optimizer, and everything in host memory."""
    parser = argparse.ArgumentParser(
        prog="python -m twinbed.sim.deepspeed.estimator",
        description="Memory of model states a GPU under ZeRO-3, as DeepSpeed's estimate_zero3_model_states_mem_needs "
        "counts it: no activations, no buffers.",
    )
    parser.add_argument("config", metavar="CONFIG_JSON", help="a Hugging Face config.json")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs that share the states")
    chosen = parser.parse_args(arguments)
    if chosen.gpus < 1:
        parser.error(f"--gpus must be >= 1, got {chosen.gpus}")
    try:
        spec = read_hf_config(chosen.config)
    except (OSError, ValueError) as err:
        parser.error(str(err))
    total, largest = num_parameters(spec), largest_module(spec)
    lines = [f"{total:,} parameters, the largest layer {largest:,}, {chosen.gpus} GPUs; a GPU holds"]
    for optimizer, weights, what in (
        (True, True, "weights and optimizer in host memory"),
        (True, False, "optimizer in host memory"),
        (False, False, "nothing in host memory"),
    ):
        nbytes = estimate_zero3(
            total, largest, ranks=chosen.gpus, offload_optimizer=optimizer, offload_parameters=weights
        )
        lines.append(f"{nbytes / 2**30:10.2f} GiB  {what}")
    sys.stdout.write("\n".join(lines) + "\n")


def estimate_zero3(
    num_parameters: int,
    largest_layer: int,
    *,
    ranks: int,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> int:
    """Bytes of model states a GPU as DeepSpeed's `estimate_zero3_model_states_mem_needs` counts them.

    18 bytes a parameter sharded (`Convention.float_gradients`); the weights alone if the optimizer is in host
    memory; nothing but a gathered layer if the weights are there too. The largest layer counts twice in 16 bits.

    Raises:
        ValueError: If parameters are offloaded and the optimizer is not: DeepSpeed has no such mode.
    """
    if offload_parameters and not offload_optimizer:
        raise ValueError("offload_parameters=True needs offload_optimizer=True")
    layer = 4 * largest_layer
    if offload_parameters:
        return layer
    per_parameter = 2 if offload_optimizer else Convention.float_gradients.bytes_per_parameter
    return layer + per_parameter * num_parameters // ranks


if __name__ == "__main__":
    main()
