"""The Fabric strategy, under its public name: ``lightning_topk.fabric.TopKStrategy``."""

from lightning_topk.adapters.lightning.fabric import TopKStrategy

__all__ = ["TopKStrategy"]
