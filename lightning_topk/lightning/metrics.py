"""What the exchange cost and what it lost, as torchmetrics."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class ExchangeVolume(Metric):
    """Bytes sent, against what a ring all-reduce would have sent.

    ``update`` once a step with that step's bytes; ``compute`` gives the sums so far.
    """

    higher_is_better = None
    is_differentiable = False
    full_state_update = False

    uplink: Tensor
    downlink: Tensor
    broadcast: Tensor
    dense: Tensor
    intra_node: Tensor
    inter_node: Tensor

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        for name in ("uplink", "downlink", "broadcast", "dense", "intra_node", "inter_node"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(
        self, uplink: int, downlink: int, dense: int, broadcast: int = 0, intra_node: int = 0, inter_node: int = 0
    ) -> None:
        """Adds the bytes of a step.

        Args:
            uplink: Bytes that this rank's worker sent to other ranks.
            downlink: Bytes that this rank's server sent to other ranks.
            dense: Bytes that a ring all-reduce of the same gradients sends from one rank.
            broadcast: Bytes sent to keep weights and buffers equal; no part of the total.
            intra_node: Bytes that the ranks of this node sent to each other.
            inter_node: Bytes that they sent to other nodes.
        """
        self.uplink += uplink
        self.downlink += downlink
        self.dense += dense
        self.broadcast += broadcast
        self.intra_node += intra_node
        self.inter_node += inter_node

    def compute(self) -> dict[str, Tensor]:
        """The sums in bytes, float64, and ``saving``: dense bytes over total bytes (1 where nothing was sent)."""
        sent = self.uplink + self.downlink
        volume = {
            "uplink_bytes": self.uplink,
            "downlink_bytes": self.downlink,
            "broadcast_bytes": self.broadcast,
            "dense_bytes": self.dense,
            "intra_node_bytes": self.intra_node,
            "inter_node_bytes": self.inter_node,
            "total_bytes": sent,
            "saving": self.dense / sent if sent else torch.ones(()),
        }
        # float64 holds every count below 2^53 exactly, and Lightning's `log` turns integers into float32.
        return {name: value.double() for name, value in volume.items()}


class CompressionError(Metric):
    """Relative compression error ‖a - C(a)‖² / ‖a‖², over all vectors seen.

    0 is lossless; random k of d gives 1 - k/d on average, and top-k of a bell-shaped vector at most (1 - k/d)² (Shi et al.
    2019, theorem 1).
    """

    higher_is_better = False
    is_differentiable = False
    full_state_update = False

    energy: Tensor
    lost: Tensor

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        for name in ("energy", "lost"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, energy: Tensor | float, lost: Tensor | float) -> None:
        """Adds one compression.

        Args:
            energy: ‖a‖², the squared norm of what there was to send.
            lost: ‖a - C(a)‖², the squared norm of what was not sent.
        """
        self.energy += energy
        self.lost += lost

    def compute(self) -> Tensor:
        """The relative error, float64 in [0, 1]; 0 where there was nothing to send."""
        return self.lost / self.energy if self.energy > 0 else torch.zeros_like(self.lost)
