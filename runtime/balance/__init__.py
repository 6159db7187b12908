"""Carries the actions of a balancing policy out on the layers of a tensor group."""
