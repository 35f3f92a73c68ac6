"""Every claim of the two papers as a command: ``python examples/lab reproduce NAME``.

Each command trains, measures or counts through the exchange that a cluster runs, and returns a
:class:`lab.report.Result`: tables, curves, and a verdict on every statement, failed ones included.
"""

CLAIMS = ("counterexample", "saving", "bound", "distribution", "operators", "convergence", "tuning", "speedup")
"""The claims of the papers; the other commands are our own experiments, of which some take hours."""
