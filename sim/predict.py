"""A prediction in one call, for scripts and notebooks."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..analysis.record import Record
from ..conf.compose import Composed, compose, from_hydra
from ..conf.schema import ExperimentConf
from .simulate import simulate


def predict(config: Sequence[str] | Mapping[str, Any] | Composed = ()) -> Record:
    """Simulate one experiment in this process, without writing anything.

    Args:
        config: Overrides as on the command line, e.g. `["model=gpt_18b", "cluster=dgx2_v100"]`; or a composed
            Hydra config; or what `conf.compose.compose` returned.

    Returns:
        The record that `target=sim` would write: `record.result` holds the keys of `result.json` (times in
        seconds, sizes in bytes), `record.ledger` the collectives.

    Raises:
        ValueError: If a key, a value or a combination is not legal.
    """
    if isinstance(config, Composed):
        composed = config
    elif isinstance(config, Mapping):
        from omegaconf import DictConfig, OmegaConf

        typed = OmegaConf.merge(OmegaConf.structured(ExperimentConf), dict(config))
        assert isinstance(typed, DictConfig)
        composed = from_hydra(typed)
    else:
        composed = compose(["target=sim", *config])
    record = simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved)
    record.result["warnings"] = [*composed.warnings, *record.result["warnings"]]
    return record
