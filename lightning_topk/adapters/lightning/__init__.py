"""The adapters to Lightning: the Trainer's strategy, Fabric's strategy, the callback and its metrics.

Importing any of them registers the names for ``Trainer(strategy=...)``.
"""

from lightning_topk.adapters.lightning import strategy as strategy
