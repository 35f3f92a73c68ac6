"""The settings in force for each bucket: what is uncompressed in it, and what was chosen for it by measuring."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.runtime.exchanger import Bucket, Tuned, Tuning, same
from lightning_topk.runtime.residuals import Progress


class BucketSettings:
    """Tells how buckets are exchanged.

    Args:
        config: The settings of all buckets.
    """

    def __init__(self, config: TopKConfig) -> None:
        self.config = config
        self.names: Mapping[Tensor, str] = {}
        """The parameters' names; empty if they are not known."""
        self.chosen: dict[Bucket, TopKConfig] = {}
        """What was chosen by measuring, bucket by bucket."""
        self._choice: dict[Bucket, TopKConfig] = {}  # will be in force from a later step on
        self._uncompressed: set[Tensor] = set()
        self._unchanged = 0  # backward passes since the buckets were regrouped

    def name(self, names: Mapping[Tensor, str]) -> None:
        """Learns the parameters' names, and which of them ``dense_parameters`` matches.

        Raises:
            ValueError: A pattern of ``dense_parameters`` matches no parameter.
        """
        self.names = names
        for pattern in self.config.dense_parameters:
            found = {parameter for parameter, name in names.items() if fnmatch.fnmatchcase(name, pattern)}
            if not found:
                known = ", ".join(sorted(names.values())[:20])
                raise ValueError(f"dense_parameters: no parameter is called {pattern!r}. There are {known}.")
            self._uncompressed |= found

    @property
    def compressed(self) -> Collection[Tensor] | None:
        """The parameters that may be compressed; None if they are not known."""
        return self.names.keys() - self._uncompressed if self.names else None

    def uncompressed_in(self, bucket: Bucket) -> list[int]:
        """Which parameters of a bucket, by number, are not compressed."""
        return [number for number, p in enumerate(bucket) if p in self._uncompressed]

    def config_of(self, bucket: Bucket) -> TopKConfig:
        """How a bucket is exchanged: by all-reduce if all of it is uncompressed, or while the choice is to come."""
        if not self._may_compress(bucket):
            return self.config.dense
        return self.chosen.get(bucket, self.config.dense) if self.config.automatic else self.config

    def tuning(
        self, buckets: Sequence[Bucket], progress: Progress, planned_steps: float, static_graph: bool
    ) -> Tuning | None:
        """What is to be chosen by measuring after a backward pass; None if nothing is, or buckets may still change.

        Args:
            buckets: That the backward pass exchanges.
            progress: How far the run has come, before this pass.
            planned_steps: Of the whole run, infinite if unknown.
            static_graph: Whether DDP regroups its buckets a pass later.
        """
        before = progress.buckets
        unchanged = len(buckets) == len(before) and all(map(same, buckets, before))
        self._unchanged = self._unchanged + 1 if unchanged else 0
        final = self._unchanged > static_graph and not progress.resumed
        if not (final and self.config.automatic) or self._choice:
            return None
        new = [bucket for bucket in buckets if bucket not in self.chosen and self._may_compress(bucket)]
        if not new:
            return None
        middle = (progress.steps + max(progress.steps, planned_steps)) / 2
        known = None if math.isinf(middle) else int(middle)
        return Tuning(self.config, new, [self.uncompressed_in(bucket) for bucket in new], known)

    def note(self, tuned: Tuned) -> None:
        """Takes note of a choice, which :meth:`adopt` puts in force."""
        self._choice = dict(zip(tuned.buckets, tuned.choice.configs, strict=True))

    def adopt(self, undecided: bool) -> None:
        """Puts the last choice in force, between two steps.

        Args:
            undecided: Whether a GradScaler may still skip a step for which something was sent. The choice then waits:
                what was sent could not come back to endpoints of other settings.
        """
        if not undecided:
            self.chosen |= self._choice
            self._choice = {}

    def _may_compress(self, bucket: Bucket) -> bool:
        """Whether there is anything in a bucket that may be compressed."""
        return any(p.numel() and p not in self._uncompressed for p in bucket)
