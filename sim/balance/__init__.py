"""Carries the actions of a balancing policy out in simulated time."""
