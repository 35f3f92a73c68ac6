"""Adapts the momentum of the user's optimizers, and watches their steps."""
