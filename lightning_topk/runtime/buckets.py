"""The settings of each bucket: its ratio, and its uncompressed parameters."""

from __future__ import annotations

import fnmatch
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_topk.bucket import TOLERANCE, BucketPlan, for_compressed, plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.runtime.jobs import Bucket
from lightning_topk.schedule import ratio_at
from lightning_topk.volume import Volume, bucket_volume

WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)\.")
"""Prefixes that activation checkpointing and torch.compile insert into parameter names."""


def names_of(module: torch.nn.Module) -> dict[Tensor, str]:
    """Names of a module's parameters, the same for wrapped, pruned and plain layers."""
    pruned = {name.removesuffix("_mask") + "_orig" for name, _ in module.named_buffers() if name.endswith("_mask")}
    return {
        parameter: WRAPPERS.sub("", name.removesuffix("_orig") if name in pruned else name)
        for name, parameter in module.named_parameters()
    }


class BucketSettings:
    """Resolves the settings for each bucket."""

    def __init__(self, config: TopKConfig, world: int, local: int) -> None:
        self.config, self._world, self._local = config, world, local
        self._rest = config  # with the saving of the compressed part
        self._plans: dict[tuple[Bucket, torch.dtype], BucketPlan] = {}
        self.names: Mapping[Tensor, str] = {}
        """The parameters' names; empty if they are not known."""
        self._uncompressed: set[Tensor] = set()

    def learn_names(self, names: Mapping[Tensor, str], whole: Iterable[Tensor] = ()) -> None:
        """Sets the parameters' names, and finds those that ``dense_parameters`` matches.

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
        self._rest = for_compressed(self.config, numel, skipped)
        self._plans.clear()

    @property
    def compressed(self) -> Collection[Tensor] | None:
        """The parameters that may be compressed; None if they are not known."""
        return self.names.keys() - self._uncompressed if self.names else None

    def plan_of(self, bucket: Bucket) -> BucketPlan:
        """The exchange plan of a bucket."""
        key = bucket, bucket[0].dtype  # a wrapper may change it
        if key not in self._plans:
            names = " ".join(self.names.get(parameter, "") for parameter in bucket)
            self._plans[key] = plan_bucket(
                self._rest,
                [parameter.numel() for parameter in bucket],
                self._world,
                self._local,
                bucket[0].itemsize,
                [number for number, parameter in enumerate(bucket) if parameter in self._uncompressed],
                tag=zlib.crc32(names.encode()) >> 8,
                in_pieces=bucket[0].device.type == "cpu",
            )
        return self._plans[key]

    def volume(self, buckets: Sequence[Bucket], rank: int, step: int, epoch: int, voting: bool) -> Volume:
        """The bytes that a rank sends in a step."""
        total = Volume()
        for bucket in buckets:
            total += bucket_volume(self.plan_of(bucket), rank, step, epoch, len(bucket) if voting else None)
        return total

    def warnings(self, buckets: Sequence[Bucket], sent: Volume) -> list[str]:
        """Returns the warnings about ``saving=`` once the buckets are final."""
        if self.config.saving is None or not self.config.compresses:
            return []
        return [words for words in (self._missed_saving(buckets, sent), self._narrow(buckets)) if words]

    def _missed_saving(self, buckets: Sequence[Bucket], sent: Volume) -> str:
        """Warning that the saving is lower than requested, with the reason; empty if it is not."""
        asked, seen = self.config.saving or 0, self._saving(sent)
        if seen >= asked * (1 - TOLERANCE):
            return ""
        whole = tuple(parameter for bucket in buckets for parameter in bucket)
        small, remedy = "this model is", "Use DDP"
        if len(buckets) > 1 and self._saving(self.volume([whole], 0, 0, 0, voting=False)) >= asked * (1 - TOLERANCE):
            small, remedy = "its buckets are", "Use a larger bucket_cap_mb= or, with fully_shard, larger modules"
        return (
            f"lightning_topk: saving={asked:g} was requested, but {small} too small: each step saves {seen:.3g}x. "
            f"{remedy}."
        )

    def _saving(self, sent: Volume) -> float:
        return sent.node_saving if self.config.by_node else sent.saving

    def _narrow(self, buckets: Sequence[Bucket]) -> str:
        """Explains the baseline of ``saving`` for gradients of less than four bytes per entry; empty otherwise."""
        asked, narrow = self.config.saving or 0, [bucket for bucket in buckets if bucket[0].itemsize < 4]
        plans = [self.plan_of(bucket) for bucket in narrow if sum(p.numel() for p in bucket)]
        sizes = [sum(plan.shape.parts.sizes) for plan in plans]
        if not plans:
            return ""
        kept = sum(ratio_at(plan.ratio, 0, 0) * size for plan, size in zip(plans, sizes, strict=True))
        dtype = str(narrow[0][0].dtype).removeprefix("torch.")
        return (
            f"lightning_topk: saving={asked:g} is relative to the {dtype} gradients that DDP would send: the density "
            f"is {kept / sum(sizes):.2g}. saving={asked * narrow[0][0].itemsize / 4:g} sends as many entries as "
            f"saving={asked:g} does of float32 gradients."
        )
