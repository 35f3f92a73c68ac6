"""The selectors, under their public names: subclass :class:`Selector` or :class:`Threshold` and pass ``selector=`` an instance."""

from lightning_topk.core.select import GaussianK, RandK, SampledK, Selector, Threshold, TopK, TrimmedK

__all__ = ["GaussianK", "RandK", "SampledK", "Selector", "Threshold", "TopK", "TrimmedK"]
