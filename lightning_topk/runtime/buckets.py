"""The settings in force for each bucket: its ratio, and what is uncompressed in it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.runtime.exchanger import Bucket, same
from lightning_topk.runtime.residuals import Progress
from lightning_topk.saving import TOLERANCE, saving_of_compressed, with_ratio
from lightning_topk.volume import Volume, volume

WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)\.")
"""What activation checkpointing and torch.compile insert into the names of a module's parameters."""


def names_of(module: torch.nn.Module) -> dict[Tensor, str]:
    """The names of a module's parameters, the same whether its layers are wrapped or pruned or not."""
    pruned = {name.removesuffix("_mask") + "_orig" for name, _ in module.named_buffers() if name.endswith("_mask")}
    return {
        parameter: WRAPPERS.sub("", name.removesuffix("_orig") if name in pruned else name)
        for name, parameter in module.named_parameters()
    }


class BucketSettings:
    """Tells how buckets are exchanged.

    Args:
        config: The settings of all buckets.
        world: Number of ranks.
        local: Ranks of a node.
    """

    def __init__(self, config: TopKConfig, world: int, local: int) -> None:
        self.config, self._world, self._local = config, world, local
        self._rest = config  # with the saving of what is compressed
        self._with_ratio: dict[tuple[Bucket, str, torch.dtype], TopKConfig] = {}
        self.names: Mapping[Tensor, str] = {}
        """The parameters' names; empty if they are not known."""
        self._uncompressed: set[Tensor] = set()
        self._unchanged = 0  # backward passes since the buckets were regrouped
        self._final = False  # whether DDP will not regroup them any more

    def learn_names(self, names: Mapping[Tensor, str], whole: Iterable[Tensor] = ()) -> None:
        """Learns the parameters' names, and which of them ``dense_parameters`` matches.

        Args:
            names: The names.
            whole: Parameters that are not compressed either.

        Raises:
            ValueError: A pattern of ``dense_parameters`` matches no parameter, or they match too many for ``saving``.
        """
        self.names = names
        self._uncompressed |= set(whole)
        for pattern in self.config.dense_parameters:
            found = {parameter for parameter, name in names.items() if fnmatch.fnmatchcase(name, pattern)}
            if not found:
                known = ", ".join(sorted(names.values())[:20])
                raise ValueError(f"dense_parameters: no parameter's name matches {pattern!r}. The names are {known}.")
            self._uncompressed |= found
        numel = sum(parameter.numel() for parameter in names if parameter.requires_grad)
        skipped = sum(parameter.numel() for parameter in self._uncompressed if parameter.requires_grad)
        self._rest = saving_of_compressed(self.config, numel, skipped)
        self._with_ratio.clear()

    @property
    def compressed(self) -> Collection[Tensor] | None:
        """The parameters that may be compressed; None if they are not known."""
        return self.names.keys() - self._uncompressed if self.names else None

    def uncompressed_in(self, bucket: Bucket) -> list[int]:
        """Which parameters of a bucket, by number, are not compressed."""
        return [number for number, p in enumerate(bucket) if p in self._uncompressed]

    def config_of(self, bucket: Bucket) -> TopKConfig:
        """How a bucket is exchanged: by all-reduce if all of it is uncompressed."""
        if not self._may_compress(bucket):
            return self.config.dense
        config = self._rest
        if config.saving is None:
            return config
        key = bucket, config.topology, bucket[0].dtype  # that of FSDP's stand-ins may change
        if key not in self._with_ratio:
            sizes, skipped = [p.numel() for p in bucket], self.uncompressed_in(bucket)
            self._with_ratio[key] = with_ratio(
                config,
                sizes,
                self._world,
                self._local,
                bucket[0].itemsize,
                sum(sizes[number] for number in skipped),
            )
        return self._with_ratio[key]

    def observe(self, buckets: Sequence[Bucket], progress: Progress, static_graph: bool) -> bool:
        """Takes note of the buckets of a backward pass; says whether they have just become final.

        Args:
            buckets: That the backward pass exchanges.
            progress: How far the run has come, before this pass.
            static_graph: Whether DDP regroups its buckets a pass later.
        """
        before, already = progress.buckets, self._final
        unchanged = len(buckets) == len(before) and all(map(same, buckets, before))
        self._unchanged = self._unchanged + 1 if unchanged else 0
        self._final = self._unchanged > static_graph
        return self._final and not already

    def volume(self, buckets: Sequence[Bucket], rank: int, step: int, epoch: int, voting: bool) -> Volume:
        """The bytes that a rank sends in a step.

        Args:
            buckets: That are exchanged.
            rank: The rank.
            step: The step, for a schedule of the ratio.
            epoch: The epoch, for a schedule of the ratio.
            voting: Whether ranks tell each other which parameters they used.
        """
        total = Volume(0, 0, 0, 0, 0, 0)
        for bucket in buckets:
            config, sizes = self.config_of(bucket), [p.numel() for p in bucket]
            skipped = sum(sizes[number] for number in self.uncompressed_in(bucket)) if config.compresses else 0
            voters, size = [len(bucket)] if voting else None, bucket[0].itemsize
            total += volume(config, [sizes], self._world, rank, size, voters, step, epoch, self._local, [skipped])
        return total

    def missed_saving(self, buckets: Sequence[Bucket], sent: Volume, larger: str) -> str:
        """Says what is saved, and why, where that is not what was asked for; empty where it is.

        Args:
            buckets: That are exchanged.
            sent: The bytes of a step.
            larger: What makes buckets larger.
        """
        asked = self.config.saving
        if asked is None or not self.config.compresses:
            return ""
        seen = sent.node_saving if self.config.by_node else sent.saving
        if abs(seen / asked - 1) <= TOLERANCE:
            return ""
        reason = "every entry is sent, and the format of values alone saves this much"
        if any(self.config_of(bucket).ratio != 1 for bucket in buckets):
            reason = (
                "buckets are small, and a payload holds at least one entry for each server and is padded to whole "
                f"words. A smaller saving= or {larger} comes nearer"
            )
        return f"lightning_topk: saving={asked:g} was asked for, but each step saves {seen:.3g}: {reason}."

    def _may_compress(self, bucket: Bucket) -> bool:
        """Whether there is anything in a bucket that may be compressed."""
        return any(p.numel() and p not in self._uncompressed for p in bucket)
