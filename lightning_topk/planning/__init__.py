"""Predictions before a run: the bytes of a step, its time, and which settings suit a cluster.

May import: ``core`` and the settings (``config``, ``schedule``, ``build``, ``saving``). It sends nothing.
"""
