"""Reads what users have about their clusters and models into YAML of ours; `command` is `twinbed-import`."""
