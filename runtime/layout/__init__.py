"""Layouts in the runtime: stages of a pipeline, and the engine that trains one."""
