"""Predictions before a run: the bytes of a step, its time, and which settings suit a cluster.

May import: ``core`` and the settings (``config``, ``recipe``, ``schedule``, ``build``). It sends nothing.
"""
