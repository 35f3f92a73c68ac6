"""torchmetrics for the exchange: bytes sent, and compression error."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

KINDS = ("uplink", "downlink", "dense", "intra_node", "inter_node")  # of bytes


class ExchangeVolume(Metric):
    """Bytes sent, compared with a ring all-reduce.

    Call ``update`` once per step with that step's bytes; ``compute`` returns the sums so far.

    Args:
        by_node: Whether ``saving`` counts the bytes between nodes (for ``topology="hierarchical"``) instead of those
            that this rank sent.
        **kwargs: Arguments of :class:`torchmetrics.Metric`.
    """

    full_state_update = False

    uplink: Tensor
    downlink: Tensor
    dense: Tensor
    inter_node: Tensor

    def __init__(self, by_node: bool = False, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.by_node = by_node
        for name in KINDS:
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(
        self, uplink: int, downlink: int, dense: int, intra_node: int = 0, inter_node: int = 0, **others: int
    ) -> None:
        """Adds the bytes of a step, the fields of a :class:`lightning_topk.volume.Volume`; ignores ``others``."""
        for kind, nbytes in zip(KINDS, (uplink, downlink, dense, intra_node, inter_node), strict=True):
            getattr(self, kind).add_(nbytes)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Returns the sums in bytes, float64, and ``saving``: dense bytes over counted bytes (1 if there are none)."""
        sent = self.uplink + self.downlink
        counted = self.inter_node if self.by_node else sent
        volume = {f"{kind}_bytes": getattr(self, kind) for kind in KINDS} | {"total_bytes": sent}
        volume["saving"] = self.dense.double() / counted if counted else torch.ones(())
        # float64 holds every count below 2^53 exactly, and Lightning's `log` turns integers into float32.
        return {name: value.double() for name, value in volume.items()}


class CompressionError(Metric):
    """Relative compression error ‖a - C(a)‖² / ‖a‖², summed over all vectors seen.

    0 is lossless. Selecting k of d entries at random gives 1 - k/d on average; top-k of a vector whose entries have a
    bell-shaped distribution gives at most (1 - k/d)² (Shi et al. 2019, theorem 1).
    """

    higher_is_better = False
    full_state_update = False

    energy: Tensor
    lost: Tensor

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        for name in ("energy", "lost"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, energy: Tensor | float, lost: Tensor | float) -> None:
        """Adds the error of a vector a: its ``energy`` ‖a‖², and the energy that was ``lost``, ‖a - C(a)‖²."""
        self.energy += energy
        self.lost += lost

    @override
    def compute(self) -> Tensor:
        """Returns the relative error, float64 in [0, 1]; 0 if there was nothing to send."""
        return self.lost / self.energy if self.energy > 0 else torch.zeros_like(self.lost)
