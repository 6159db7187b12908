"""Published figures against the simulator: rows, statistics beside a null baseline, gates, `twinbed-validate`."""
