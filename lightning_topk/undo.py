"""Undoes what was exchanged for an optimizer step that was not taken.

With a GradScaler, a step whose gradients hold an infinity or a NaN is skipped. What the exchange had sent for it, from any
worker or server, in any bucket, reached nobody: the residuals must be again what they were before. So they are copied
when gradients for a step begin to come, and copied back when it turns out that they were not finite.

A *pass* is one backward pass. Several may make up one step; the copy is renewed only when the optimizer really stepped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_topk.exchange import Endpoint
from lightning_topk.ops import reference


class Steps:
    """The steps that optimizers really took, and whether the gradients of the pass under way are finite.

    Args:
        optimizers: All that share a GradScaler.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.taken = [0] * max(1, len(optimizers))
        """Steps by optimizer. A fused one counts those that it skips inside its kernel, too; ``failed`` tells them apart."""
        self.failed: list[Tensor | None] = []
        """By optimizer, a scalar bool: whether a gradient of the pass was not finite. Each pass has a list of its own."""
        self._optimizers = optimizers
        self._hooks = [o.register_step_post_hook(self._counter(i)) for i, o in enumerate(optimizers)]
        self.begin_pass()

    def _counter(self, number: int):  # type: ignore[no-untyped-def]  # torch's hook type is internal
        def count(*_: object) -> None:
            self.taken[number] += 1

        return count

    def begin_pass(self) -> None:
        """A backward pass begins."""
        self.failed = [None] * len(self.taken)

    def owners(self, parameters: Sequence[Tensor]) -> list[int]:
        """The optimizer of each parameter; the first, of those that have none."""
        # Now, since parameters may be added to an optimizer when they are unfrozen.
        owner = {p: i for i, o in enumerate(self._optimizers) for group in o.param_groups for p in group["params"]}
        return [owner.get(parameter, 0) for parameter in parameters]

    def close(self) -> None:
        """Stops counting."""
        for hook in self._hooks:
            hook.remove()


class Undo:
    """The memories of one endpoint as they were before the step under way.

    Args:
        end: The endpoint.
        parameters: Those of its bucket.
        steps: The optimizers' steps.
    """

    def __init__(self, end: Endpoint, parameters: Sequence[Tensor], steps: Steps) -> None:
        self._steps = steps
        owners = steps.owners(parameters)
        self.owners = sorted(set(owners))
        self._now = [tensor for link in end.links for tensor in link.memory.tensors().values()]
        self._masks: dict[int, list[Tensor | None]] = {owner: [None] * len(self._now) for owner in self.owners}
        if len(self.owners) > 1:
            of_element = torch.tensor(owners, device=end.sizes.device).repeat_interleave(end.sizes)
            for owner in self.owners:
                whole = of_element == owner
                masks = [whole] * len(end.uplink.memory.tensors())
                if end.downlink is not None:
                    served = reference.shard_rows(whole, end.layout)[end.shard]
                    masks += [served] * len(end.downlink.memory.tensors())
                self._masks[owner] = list(masks)
        self._before: list[Tensor] = []
        self._seen: list[int] = []
        self._failed: list[Tensor | None] | None = None

    def decide(self) -> None:
        """Ends the last pass: puts back what belongs to a step that was not taken."""
        if self._failed is None:
            return
        for owner in self.owners:
            failed, taken = self._failed[owner], self._steps.taken[owner] != self._seen[owner]
            for now, before, mask in zip(self._now, self._before, self._masks[owner], strict=True):
                if failed is not None:
                    reference.replace_(now, before, failed if mask is None else failed & mask)
                if taken and mask is None:
                    before.copy_(now)
                elif taken:
                    reference.replace_(before, now, mask)
        self._failed = None

    def begin(self, renew: bool) -> None:
        """Begins a pass, after :meth:`decide`.

        Args:
            renew: Whether the memories were changed meanwhile, by something that stays.
        """
        if not self._before:
            self._before = [now.clone() for now in self._now]
        elif renew:
            for now, before in zip(self._now, self._before, strict=True):
                before.copy_(now)
        self._seen, self._failed = list(self._steps.taken), self._steps.failed

    def note(self, failed: Tensor) -> None:
        """Takes note that gradients of this pass were not finite where the scalar bool ``failed`` holds."""
        assert self._failed is not None
        for owner in self.owners:
            earlier = self._failed[owner]
            self._failed[owner] = failed if earlier is None else earlier | failed
