"""The adapters to Lightning: the Trainer's strategy, Fabric's strategy, the callback and its metrics.

May import: ``ddp``, ``fsdp`` and everything below them, ``lightning`` or ``pytorch_lightning``, and ``torchmetrics``.
No other wing imports these. Importing any of them registers the names for ``Trainer(strategy=...)``.
"""

from lightning_topk.adapters.lightning import strategy as strategy
