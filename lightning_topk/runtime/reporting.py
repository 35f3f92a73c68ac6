"""What a state knows and tells of its exchanges, between two backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.runtime.buckets import BucketSettings
from lightning_topk.runtime.messages import WarnOnce
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.telemetry import Report, Telemetry
from lightning_topk.volume import Volume


class Reporting:
    """Settings, residuals, bytes, times and errors of one rank.

    Args:
        config: The settings, on these ranks.
        residuals: What the rank keeps.
        rank: This rank.
        world: Number of ranks.
        local: Ranks of a node.
        epoch: Gives the number of epochs completed.
        say: Tells the user something.
        shards_per_node: How many ranks of this node, this one included, exchange a shard of the same gradients each.
    """

    def __init__(
        self,
        config: TopKConfig,
        residuals: Residuals,
        rank: int,
        world: int,
        local: int,
        epoch: Callable[[], int],
        say: WarnOnce,
        shards_per_node: int = 1,
    ) -> None:
        self.config, self.residuals, self.rank, self.world, self.local = config, residuals, rank, world, local
        self.buckets = BucketSettings(config, world, local)
        self.telemetry = Telemetry(world)
        self.voting = False
        """Whether the ranks tell each other in every step which parameters they used."""
        self.measure = self.measure_layers = self.timing = False
        """Whether exchanges measure their compression error, that of each parameter too, and their time."""
        self._epoch, self._say, self._shards_per_node = epoch, say, shards_per_node

    def _collect(self) -> None:
        """Takes what the exchanges have left."""

    @property
    def names(self) -> Mapping[Tensor, str]:
        """The parameters' names; empty if they are not known."""
        return self.buckets.names

    @property
    def exchanged(self) -> bool:
        """Whether anything was exchanged since the last report."""
        self._collect()
        return self.telemetry.exchanged

    @property
    def nonfinite_steps(self) -> int:
        """Backward passes so far that delivered a gradient with a NaN or an infinity. Waits for the device."""
        self._collect()
        return self.telemetry.nonfinite_steps

    def report(self) -> Report:
        """What was exchanged since the last call. Call it between two backward passes.

        There is one report: a :class:`lightning_topk.CompressionMonitor` takes it at every step.
        """
        self._collect()
        return self.telemetry.report(self.names)

    def drop_report(self) -> None:
        """Leaves what was exchanged since the last report out of the next one: it was for no step of the training."""
        self._collect()
        self.telemetry.drop()

    def predicted(self, rank: int | None = None) -> Volume:
        """The bytes that a rank will send in the next step, if it exchanges the buckets of the last.

        What FSDP2 sends inside a node is not among them.

        Args:
            rank: The rank. Default: this one.
        """
        progress, mine = self.residuals.progress, self.rank if rank is None else rank
        total = self.buckets.volume(progress.buckets, mine, progress.steps, self._epoch(), self.voting)
        inside, outside, dense = (
            self._shards_per_node * each for each in (total.intra_node, total.inter_node, total.dense_inter_node)
        )
        return replace(total, intra_node=inside, inter_node=outside, dense_inter_node=dense)

    def continue_from(self, other: Reporting) -> None:
        """Goes on counting and measuring where another state of the same training ends."""
        self.measure, self.measure_layers, self.timing = other.measure, other.measure_layers, other.timing
        self.telemetry.continue_from(other.telemetry)
        self._say.said = other._say.said
