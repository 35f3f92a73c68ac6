"""Residuals belong to parameters: each bucket has an endpoint, found by its parameters and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Endpoint
from lightning_topk.runtime.parameter_memories import Memories, ParameterMemories, server_memory
from lightning_topk.runtime.skipped_steps import Undo


@dataclass
class Progress:
    """How far a run has come, for what depends on it; written between two backward passes.

    Attributes:
        steps: Gradients exchanged so far, for schedules and selectors.
        learning_rates: The optimizers', in the last step, for residuals that follow them.
        buckets: The parameters that were exchanged together in the last backward pass.
        resumed: Backward passes in which DDP may still use its first buckets, instead of the checkpoint's ``buckets``.
    """

    steps: int = 0
    learning_rates: list[float] = field(default_factory=list)
    buckets: tuple[tuple[Tensor, ...], ...] = ()
    resumed: int = 0


@dataclass
class _InUse:
    """An endpoint, the settings with which it was made and, with a GradScaler, what undoes skipped steps."""

    end: Endpoint
    config: TopKConfig
    undo: Undo | None = None

    def decide(self) -> None:
        """Restores the memories if the scaler skipped the last step."""
        if self.undo is not None:
            self.undo.decide()


class Residuals:
    """The endpoints of one rank, found by the parameters of their bucket.

    While an exchange is under way only the lane uses them; the caller's side does between two backward passes.
    """

    def __init__(self) -> None:
        self.kept = ParameterMemories()
        self.progress = Progress()
        self.stand_ins: dict[str, Tensor] = {}
        """What stands for parameters that are sharded, by name (:class:`lightning_topk.runtime.units.Unit`)."""
        self._live: dict[tuple[Tensor, ...], _InUse] = {}

    @property
    def endpoints(self) -> Iterable[Endpoint]:
        """The endpoints in use."""
        for each in self._live.values():
            each.decide()
        return [each.end for each in self._live.values()]

    def endpoint(
        self,
        parameters: tuple[Tensor, ...],
        config: TopKConfig,
        make: Callable[[], Endpoint],
        lr_ratio: float = 1.0,
        make_undo: Callable[[Endpoint], Undo] | None = None,
    ) -> Endpoint:
        """The endpoint of a bucket for its next exchange, with all that its parameters have left so far.

        Args:
            parameters: The bucket's parameters, in its order.
            config: The settings in force for the bucket.
            make: Makes an endpoint with empty memories, for a bucket that is new, or whose settings are.
            lr_ratio: The last step's learning rate over this step's, by which residuals are scaled (Zheng et al. 2019).
            make_undo: Makes what undoes skipped steps of a new endpoint, if a scaler may skip some.
        """
        before: list[Tensor] = []
        if parameters not in self._live or self._live[parameters].config != config:
            self.dissolve(set(parameters))
            end = make()
            before = self.kept.fill(end, parameters)
            self._live[parameters] = _InUse(end, config)
        used = self._live[parameters]
        used.decide()
        if lr_ratio != 1:
            used.end.rescale_(lr_ratio)
        if make_undo is not None:
            if used.undo is None:
                used.undo = make_undo(used.end)
                used.undo.before = before
            used.undo.begin(renew=lr_ratio != 1)
        return used.end

    def forget_steps(self) -> None:
        """Undoes the last step if it was skipped, and drops the copies: the next optimizers get new ones."""
        for each in self._live.values():
            each.decide()
            each.undo = None

    def dissolve(self, parameters: set[Tensor]) -> None:
        """Takes apart the endpoints that hold any of these parameters; their next exchange makes new ones."""
        for bucket in [bucket for bucket in self._live if not parameters.isdisjoint(bucket)]:
            used = self._live.pop(bucket)
            used.decide()
            self.kept.take(bucket, used.end, used.undo)

    def settle(self) -> None:
        """Takes all endpoints apart and moves what they held to the CPU, until their parameters come again."""
        self.dissolve({parameter for bucket in self._live for parameter in bucket})
        for memories in (self.kept.worker, self.kept.server):
            for memory in memories.values():
                memory.update({name: part.cpu() for name, part in memory.items()})

    def retain(self, parameters: Iterable[Tensor]) -> None:
        """Forgets all parameters but these: another model has no use for the residuals of the last, and begins anew."""
        keep = set(parameters)
        known = {*self.kept.known, *(parameter for bucket in self.progress.buckets for parameter in bucket)}
        if known and keep.isdisjoint(known):
            self.progress = Progress()
        self._live = {bucket: used for bucket, used in self._live.items() if keep.issuperset(bucket)}
        progress = self.progress
        progress.buckets = tuple(bucket for bucket in progress.buckets if keep.issuperset(bucket))
        for parameter in known - keep:
            self.kept.forget(parameter)

    def restore(
        self,
        buckets: Iterable[tuple[Tensor, ...]],
        worker: Callable[[Tensor, int], dict[str, Tensor]],
        server: Memories,
        make: Callable[[tuple[Tensor, ...]], tuple[TopKConfig, Endpoint]],
    ) -> None:
        """Replaces all that there is by the residuals of a checkpoint.

        Args:
            buckets: Parameters that were exchanged together in the last pass. Others may have residuals too, if they
                were frozen since.
            worker: Gives this worker's memory of a parameter that is cut into a number of pieces, each ``[numel]``.
            server: The whole servers' memory of each parameter; the same on every rank.
            make: Gives the settings in force for a bucket, and makes its endpoint.
        """
        self.dissolve({parameter for bucket in self._live for parameter in bucket})
        progress = self.progress
        progress.buckets, progress.resumed = tuple(buckets), 2  # static_graph regroups buckets one pass later; else 1
        together = {parameter for bucket in progress.buckets for parameter in bucket}
        alone = [(parameter,) for parameter in server if parameter not in together]
        made = {bucket: make(bucket) for bucket in (*progress.buckets, *alone)}
        self.kept.restore({bucket: end for bucket, (_, end) in made.items()}, worker, server)
        for bucket, (config, end) in made.items():
            self._live[bucket] = _InUse(end, config)
        self.dissolve({parameter for bucket in alone for parameter in bucket})  # none of them is exchanged now

    def held(self) -> dict[Tensor, tuple[Tensor, Tensor]]:
        """What this rank holds of each parameter that was exchanged: as a worker and as a server.

        Returns:
            Two residuals ``[numel]`` for each parameter; the server's is zero where another rank serves. The mean over
            the ranks of the first plus the sum of the second is the gradient that is still to be delivered. So a rank
            that holds a piece for its node shows it times the ranks of a node, and zero elsewhere.
        """

        def residual(parts: dict[str, Tensor], parameter: Tensor, count: int) -> Tensor:
            kept = parts.get("residual", torch.zeros(()).expand(parameter.numel()))
            return kept if count == 1 else kept * count

        return {
            parameter: (
                residual(worker, parameter, self.kept.pieces.counts.get(parameter, 1)),
                residual(server, parameter, 1),
            )
            for parameter, (worker, server) in self.memories().items()
        }

    def energy(self) -> Tensor:
        """``[2]`` float64: the sums of squares of this rank's worker and server residuals.

        The mean over the ranks of the first is the mean over the workers, also where the ranks of a node are one
        worker.
        """
        energy = torch.zeros(2, dtype=torch.float64)
        for end in self.endpoints:
            for side, link in enumerate(end.links):
                kept = link.memory.tensors().get("residual")
                if kept is not None:
                    shared = 1 if side else end.parts.count
                    energy[side] += shared * torch.linalg.vector_norm(kept, dtype=torch.float64).square().cpu()
        return energy

    def memories(self) -> dict[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """All memories by parameter: the worker's and the server's, each ``[numel]`` by name.

        They are views where they are in use. Every rank names a server's residual, whether it serves or not.
        """
        pieces, worker = self.kept.pieces, self.kept.worker
        server = {parameter: dict(parts) for parameter, parts in self.kept.server.items()}
        for bucket, used in self._live.items():
            used.decide()
            pieces.scatter(server, bucket, used.end.parts.pieces, server_memory(used.end))
        known = {*worker, *server, *(parameter for bucket in self._live for parameter in bucket)}
        for p in known:
            if not server.get(p):
                dtype = torch.promote_types(p.dtype, torch.float32)
                server[p] = {"residual": torch.zeros(pieces.layout(p).numel, dtype=dtype)}
        return {
            p: (
                {name: pieces.whole(piece, p) for name, piece in worker.get(p, {}).items()},
                {name: pieces.whole(piece, p) for name, piece in server[p].items()},
            )
            for p in known
        }
