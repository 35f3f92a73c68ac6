"""From ``saving=`` to the ratio of each bucket, by the arithmetic of bytes.

``saving=50`` asks for a fiftieth of the bytes of a ring all-reduce. What a bucket sends at a ratio follows from
integers: its size, the topology, the ranks, positions, values and headers. So the ratio that sends just as much is
found before anything is sent, and it is the same in every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_topk.build import make_codecs, make_shape
from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Shape
from lightning_topk.core.requests import AllReduce, placeholder

TOLERANCE = 0.02
"""By which the saving of a model may differ from the one asked for, without a remark."""


def with_ratio(
    config: TopKConfig, sizes: Sequence[int], world: int, local: int = 1, itemsize: int = 4, uncompressed: int = 0
) -> TopKConfig:
    """The settings of one bucket, with the ratio that its saving takes.

    Args:
        config: The settings, on these nodes (:meth:`lightning_topk.TopKConfig.on`). With ``dense_parameters``, its
            saving is that of the rest: see :func:`saving_of_compressed`.
        sizes: Elements of each parameter of the bucket.
        world: Number of ranks.
        local: Ranks of a node.
        itemsize: Bytes of an element of the gradient.
        uncompressed: Elements of the bucket that are not compressed.

    Returns:
        Settings with a literal ratio: of all possible ones, the one whose bytes are nearest to those asked for. The
        same settings if they have a ratio, or compress nothing. A single rank, which sends nothing, has the ratio of
        two.
    """
    if config.saving is None or not config.compresses:
        return config
    ratio = _ratio(config, tuple(sizes), max(2, world), local, itemsize, uncompressed)
    return replace(config, saving=None, ratio=ratio)


def saving_of_compressed(config: TopKConfig, numel: int, uncompressed: int) -> TopKConfig:
    """The settings with the saving that the compressed part of a gradient takes for all of it to save that much.

    Args:
        config: The settings, with the saving of the whole gradient, if with one.
        numel: Elements of the gradient.
        uncompressed: Those that are not compressed.

    Raises:
        ValueError: What is not compressed is more than the bytes asked for.
    """
    saving = config.saving
    if saving is None or not uncompressed:
        return config
    rest = numel / saving - uncompressed
    if rest <= 0:
        raise ValueError(
            f"dense_parameters are {uncompressed / numel:.2%} of the gradient, so that it cannot be sent in 1 / "
            f"{saving:g} of the bytes. Pass saving= below {numel / uncompressed:.3g}, or fewer dense_parameters."
        )
    return replace(config, saving=(numel - uncompressed) / rest)


def sent_and_dense(shape: Shape, config: TopKConfig, local: int, itemsize: int) -> tuple[int, int]:
    """Bytes of an exchange and of a ring all-reduce: the busiest rank's, or those that leave a node.

    The ranks of a node that exchange as one worker share the node's network, so there the node's bytes count.

    Args:
        shape: The bucket.
        config: The settings, with a ratio.
        local: Ranks of a node.
        itemsize: Bytes of an element of the gradient.
    """
    ring = AllReduce(placeholder(sum(shape.parts.sizes) * itemsize), "uplink")
    asked = shape.topology.requests(shape, make_codecs(config, shape), itemsize)
    if shape.parts.count > 1:
        leaving = sum(each.node_bytes(0, shape.workers, local)[1] for each in asked)
        return leaving, ring.node_bytes(0, shape.workers, local)[1]
    return sum(each.sent_bytes(0, shape.workers) for each in asked), ring.sent_bytes(0, shape.workers)


def _ratio(
    config: TopKConfig, sizes: tuple[int, ...], world: int, local: int, itemsize: int, uncompressed: int
) -> float:
    """The ratio whose bytes are nearest to those asked for."""
    assert config.saving is not None
    shape = make_shape(config, sizes, world, local)
    layout = shape.layout

    def ratio(kept: int) -> float:
        """That which keeps so many entries of each shard."""
        return min(1.0, kept * layout.shards / layout.numel)

    def sent(kept: int) -> float:
        return sent_and_dense(shape, replace(config, saving=None, ratio=ratio(kept)), local, itemsize)[0]

    _, dense = sent_and_dense(shape, replace(config, saving=None, ratio=1.0), local, itemsize)
    budget = dense * (1 - uncompressed / sum(sizes)) / config.saving
    # Bytes grow with the number of entries, except at two points where positions are no longer sent: where a server
    # that does not compress sends all entries, and where all ranks do. Of equal bytes, take those with more entries.
    whole = layout.shard_size if config.bidirectional else -(-layout.shard_size // shape.world)
    starts = sorted({1, whole, layout.shard_size})
    low = max((start for start in starts if sent(start) <= budget), default=1)
    high = min((start for start in starts if start > low), default=low + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sent(middle) <= budget else (low, middle)
    nearest = min({low, min(high, layout.shard_size)}, key=lambda kept: abs(math.log(sent(kept) / budget)))
    return ratio(nearest)
