"""The one entry point: `python run.py [overrides]`, installed as `twinbed`. Plain Hydra."""

import sys
from pathlib import Path

# Run as a script, Python puts this folder first on the path, where `kernels/` would shadow the installed
# package of that name. The project itself is imported as `twinbed`.
if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent]

import hydra
from omegaconf import DictConfig

from twinbed.conf.compose import CONFIG_NAME, CONFIG_PATH, register_schema


@hydra.main(config_path=CONFIG_PATH, config_name=CONFIG_NAME, version_base="1.3")
def _hydra_main(config: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from twinbed.experiment import ExperimentError, run_experiment

    runtime = HydraConfig.get()
    try:
        run_experiment(config, Path(runtime.runtime.output_dir))
    except ExperimentError as err:
        if runtime.mode is RunMode.MULTIRUN:
            raise  # Hydra goes on with the other points only after an exception
        sys.stderr.write(f"twinbed: {err}\n")
        sys.exit(1)


def main() -> None:
    """The command `twinbed`."""
    register_schema()
    _hydra_main()


if __name__ == "__main__":
    main()
