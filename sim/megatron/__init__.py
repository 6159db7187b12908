"""Megatron: programs of pipeline stages from a layout policy and a communication policy."""
