"""The selectors, under their public names; to add one, subclass :class:`Selector` or :class:`Threshold`."""

from lightning_topk.core.select import GaussianK, RandK, SampledK, Selector, Threshold, TopK, TrimmedK

__all__ = ["GaussianK", "RandK", "SampledK", "Selector", "Threshold", "TopK", "TrimmedK"]
