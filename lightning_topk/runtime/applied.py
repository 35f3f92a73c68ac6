"""What dense training would apply of a gradient: the user's clipping, and the learning rate of its step.

Dense training clips the mean gradient of each step and applies it at the rate of that step. A residual adds up
gradients of many steps, and delivers them later. So that each of them counts as much, the residual holds
``c_t u_t g_t``, and what it delivers is divided by ``u_t`` of that step (:class:`lightning_topk.core.guards.Applied`).

**The rate** ``u_t`` is the optimizer's, relative to the one in whose unit the residual is. Only changes of the rate
matter, so groups of different rates compete for payloads as before. A falling rate enlarges what waits; for optimizers
other than SGD without momentum, which would keep the large gradients, by a hundredth a step at most.

**The clipping** ``c_t = min(1, C / n_t)`` depends on C, which the user's code knows, and on the norm ``n_t`` of the
mean gradient, which no rank knows before the exchange of the first bucket. Both are estimated without communication:

- C shows after each step: if clipping acted, the norm of the gradients is C, whatever it was when they were delivered.
  Two steps that were clipped by different factors to the same norm are evidence of it.
- A worker knows the norm of its own gradient. Averaging takes noise out, to a share of it that shows in the past: the
  energy of delivered gradients is that of the mean gradients, once training has begun. A bucket's norm, times this
  share, and the usual energy of the other buckets make ``n_t``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topk.bucket import Bucket
from lightning_topk.core import ops
from lightning_topk.runtime.momentum import all_parameters, local_part

MEMORY = 0.9
"""Weight of the passes before in running means of energies."""
NEAR = 1e-3
"""Relative difference below which two norms or factors count as equal."""
SLACK = 1.05
"""Factor by which the exchange clips less after each pass that only it has clipped."""
SURE = 5
"""Most steps of evidence for a norm of clipping that are counted."""


class Unit(NamedTuple):
    """The unit of a residual: at this rate of this optimizer, it is a gradient. Unknown if the rate is 0."""

    optimizer: str = ""  # see `kind_of`: rates of different kinds do not compare
    rate: float = 0.0

    def over(self, other: Unit) -> float:
        """This rate over another one; 0 if they do not compare."""
        return self.rate / other.rate if other.rate and self.optimizer == other.optimizer else 0.0


UNKNOWN = Unit()
PLAIN = "SGD"
"""The kind of SGD without momentum, whose weights move by gradient times rate."""


def kind_of(optimizer: Optimizer, group: Mapping[str, object]) -> str:
    """The class of a group's optimizer, and whether SGD has momentum."""
    name = type(optimizer).__name__
    return f"{name} with momentum" if name == PLAIN and group.get("momentum") else name


class Rates(NamedTuple):
    """Learning rates of a pass, by parameter group; 0 where a group has none, or one that only the device knows."""

    group_of: Mapping[Tensor, int]  # by member of a bucket
    optimizers: tuple[str, ...]  # their kinds
    now: tuple[float, ...]
    last: tuple[float, ...]  # in the last step that was taken

    def of(self, member: Tensor) -> Unit:
        """The rate of a member of a bucket in this pass; in the last step if it is 0 now, as nothing is applied."""
        group = self.group_of.get(member)
        return UNKNOWN if group is None else Unit(self.optimizers[group], self.now[group] or self.last[group])

    def in_last_step(self, member: Tensor) -> Unit:
        """Its rate in the last step; in this pass if there was none. A user may set the rate after backward."""
        group = self.group_of.get(member)
        return UNKNOWN if group is None else Unit(self.optimizers[group], self.last[group] or self.now[group])


def rate_of(group: Mapping[str, object]) -> float:
    """The learning rate of a parameter group, or 0: reading a scalar tensor on a GPU would wait for it."""
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        return 0.0 if rate.is_cuda else float(rate)
    return float(rate) if isinstance(rate, Real) else 0.0


class Clipping:
    """The user's clipping, as far as norms show it. All values stay on the device.

    ``shards`` is the group of all ranks that exchange a shard of the same gradients, if there are several.
    """

    def __init__(self, shards: dist.ProcessGroup | None = None) -> None:
        self._group, self._shards = shards, 1 if shards is None else dist.get_world_size(shards)
        self._buckets: tuple[Bucket, ...] = ()
        self._means: Sequence[Tensor] | Tensor = ()  # [buckets, 3]: own, delivered norms squared and weights, added up
        self._delivered: Tensor | None = None  # [buckets] squares of delivered norms in the last pass
        self._passed: Tensor | None = None  # the square of the norm with which optimizers have stepped since
        self._stepped: set[Tensor] = set()  # the parameters of these optimizers
        self._complete = False  # whether every bucket has some of them
        self.limit: Tensor | None = None
        """``[4]``: the norm to which the user clips, the last factor, how sure the norm is, slack; None at first."""
        self._acted: Tensor | None = None  # whether the exchange clipped in the last pass
        self._clips: Mapping[Bucket, Tensor] = {}

    @torch.no_grad()
    def fold(self, buckets: Sequence[Bucket], norms: Sequence[Tensor]) -> None:
        """Takes the ``[3]`` norms of the buckets of a whole pass, see :class:`.Outcome`."""
        squares = torch.stack([*norms]).square()
        self._acted, squares = (squares[:, 0] > squares[:, 1] * (1 + NEAR)).any(), squares[:, 1:]
        ops.use_here(*self._means)
        none, known = squares.new_zeros(3), dict(zip(self._buckets, self._means, strict=True))
        if len(known) == len(buckets) and all(map(operator.is_, self._buckets, buckets)):
            assert isinstance(self._means, Tensor)
            before = self._means
        else:
            before = torch.stack([known.get(bucket, none).to(none.device) for bucket in buckets])
            self._buckets = tuple(buckets)
        weighed = torch.nn.functional.pad(squares, (0, 1), value=1.0)
        means = MEMORY * before + (1 - MEMORY) * weighed
        self._means = torch.where(weighed.isfinite().all(), means, before)
        self._delivered, self._passed, self._stepped = squares[:, 1], None, set()

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, held_by_optimizers: Callable[[Bucket], Collection[Tensor]]) -> None:
        """Measures the gradients with which optimizers have stepped since the pass, after this one's step.

        Gradients of another optimizer's turn are not among them (those of a GAN's other network).
        """
        if self._delivered is None:
            return
        scale = getattr(optimizer, "grad_scale", None)  # of a fused step, which has not unscaled the gradients
        self._stepped.update(all_parameters(optimizer))
        members = [[p for p in held_by_optimizers(bucket) if p in self._stepped] for bucket in self._buckets]
        self._complete = all(members)
        grads = [local_part(p.grad) for several in members for p in several if p.grad is not None]
        found = [each.coalesce().values() if each.is_sparse else each for each in grads if each.numel()]
        if found:
            wide = torch.float32 if all(each.itemsize <= 4 for each in found) else torch.float64
            passed = torch.stack(torch._foreach_norm(found, 2, wide)).float().square().sum()
            self._passed = passed if scale is None else passed / scale**2

    @torch.no_grad()
    def begin_pass(self) -> None:
        """Estimates the clipping of the next pass from the last one and its step."""
        if self._delivered is None:
            return
        delivered, device = self._delivered, self._delivered.device
        assert isinstance(self._means, Tensor)
        known = self._passed is not None and self._complete
        after = self._passed if self._passed is not None and known else delivered.new_full((), torch.nan)
        ops.use_here(delivered, self._means, after)
        own, mean, weight = self._means.unbind(1)
        energies = (mean / weight).nan_to_num(0.0)  # of a bucket whose only gradients so far were not finite
        sums = torch.stack([delivered.sum(), after, energies.sum()])
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        before, after, total = sums.unbind()
        if self.limit is None:
            self.limit = torch.tensor([torch.nan, torch.nan, 0.0, 1.0]).to(device, non_blocking=True)
        assert self._acted is not None
        ops.use_here(self.limit, self._acted)
        factor, norm = (after / before).sqrt(), after.sqrt()
        self.limit = self._updated(self.limit.to(device), factor, norm, self._acted)
        inverse = torch.where(self.limit[2] > 0, (self.limit[0] * self.limit[3]).reciprocal(), 0.0)
        share = (mean / own).clamp(max=1).nan_to_num(1.0)
        others = (total - self._shards * energies).clamp(min=0)
        clips = inverse * torch.stack([self._shards * share, others], 1).sqrt()
        self._clips = dict(zip(self._buckets, clips, strict=True))
        self._delivered = None

    def of(self, bucket: Bucket, device: torch.device) -> Tensor:
        """The clipping of a bucket's gradient in this pass, ``[2]`` float32; see :class:`.Applied`."""
        found = self._clips.get(bucket)
        return torch.zeros(2, device=device) if found is None else found

    @staticmethod
    def _updated(limit: Tensor, factor: Tensor, norm: Tensor, acted: Tensor) -> Tensor:
        """The norm to which gradients are clipped, the factor, the evidence and the slack, after one more step.

        A step that clips to another norm counts against it twice: it may be no clipping of norms at all. If the
        exchange has clipped and the user has not, the user may have stopped: then the exchange clips less and less,
        until the user's clipping shows again.
        """
        known, before, sure, slack = limit.unbind()
        clipped = factor < 1 - NEAR  # False if unknown, or not finite
        same = (norm / known - 1).abs() < NEAR
        other_factor = (factor / before - 1).abs() > NEAR
        evidence = (same & other_factor).float() - 2.0 * (~same & ~known.isnan()).float()
        sure = (sure + torch.where(clipped, evidence, 0.0)).clamp(-SURE, SURE)
        grown = torch.where(known < norm, norm, known)  # it lets a larger one pass
        slack = torch.where(clipped, 1.0, torch.where(acted & (factor >= 1 - NEAR), slack * SLACK, slack))
        return torch.stack([torch.where(clipped, norm, grown), torch.where(clipped, factor, before), sure, slack])
