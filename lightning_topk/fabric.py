"""The Fabric strategies, under their public names: ``lightning_topk.fabric.TopKStrategy``, and for sharded models."""

from lightning_topk.lightning.fabric import TopKModelParallelStrategy, TopKStrategy

__all__ = ["TopKModelParallelStrategy", "TopKStrategy"]
