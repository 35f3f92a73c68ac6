"""Every claim of the two papers as a command: ``python -m lightning_topk reproduce NAME``.

Each trains, measures or counts through the exchange that a cluster runs, and returns a
:class:`lightning_topk.lab.report.Result`: tables, curves, and a verdict on every statement. A claim that fails says so.
"""

CLAIMS = ("counterexample", "saving", "bound", "distribution", "operators", "convergence", "tuning", "speedup")
"""The claims of the papers; ``saving-curves`` is an experiment of our own, which takes long."""
