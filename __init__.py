"""twinbed: one policy object, carried out by a simulator and by real training."""
