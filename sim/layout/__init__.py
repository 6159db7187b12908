"""Layouts under engine=fsdp2: programs of ranks that share layers, tokens or a pipeline, from `policies.layout`."""
