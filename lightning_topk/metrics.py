"""The metrics of the exchange, under their public names."""

from lightning_topk.adapters.lightning.metrics import CompressionError, ExchangeVolume

__all__ = ["CompressionError", "ExchangeVolume"]
