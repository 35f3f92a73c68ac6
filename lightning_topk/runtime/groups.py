"""The process groups of a rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.config import TopKConfig, check_count
from lightning_topk.consensus import check_agreement, every_rank, gathered
from lightning_topk.core import ops
from lightning_topk.core.requests import Among

DESCRIPTION = "lightning_topk"
"""Group description shown in torch's errors: NCCL's watchdog names the group whose collective timed out."""
PATIENCE = 5.0
"""Seconds to wait at the end of training for collectives that another rank may never join."""


@dataclass(frozen=True, eq=False)
class Groups:
    """The process groups of a rank.

    Attributes:
        among: The group of all ranks that exchange gradients, ``all``; and with a hierarchy ``node``, the ranks of this
            node, and ``peers``, those with the same local rank on every node.
        rank: This rank in them.
        world: Their number of ranks.
        device: The model's device on this rank.
        local: Ranks per node.
        timeout: Timeout of their collectives.
        kind: A later state of the same sub-group reuses closed groups with this key; None for groups of all ranks.
        second_groups: Groups of the same ranks for a second exchange at the same time; None if there are none.
        replies: Memory for the replies to the requests of an exchange, by their place in it; exchanges take turns.
    """

    among: Mapping[Among, dist.ProcessGroup]
    rank: int
    world: int
    device: torch.device
    local: int
    timeout: timedelta | None
    kind: tuple[Any, ...] | None = None
    second_groups: Groups | None = None
    replies: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def forget_replies(self) -> None:
        """Frees the memory of replies: other exchanges follow."""
        self.replies.clear()
        if self.second_groups is not None:
            self.second_groups.forget_replies()

    @property
    def all(self) -> dist.ProcessGroup:
        """The group of all ranks that exchange gradients."""
        return self.among["all"]

    @classmethod
    def make(
        cls,
        parent: dist.ProcessGroup | None,
        device: torch.device,
        timeout: timedelta | None,
        local: int = 1,
        hierarchy: bool = False,
        second: bool = False,
    ) -> Groups:
        """Creates groups of a parent's ranks and backend, separate from it. A collective.

        A parent with only some of the ranks may reuse groups of an earlier state. With ``hierarchy``, nodes of
        ``local`` consecutive ranks get groups too. With ``second``, groups of all ranks that only use gloo get second
        groups, unless torch checks collectives before it starts them (:mod:`lightning_topk.runtime.lanes`). NCCL needs
        none: on a GPU one side stream runs all exchanges.
        """
        ranks, mine, kind = dist.get_process_group_ranks(parent or dist.group.WORLD), dist.get_rank(parent), None
        if parent is not None:
            kind = ranks, dist.get_backend(parent), device, timeout, local, hierarchy
            _REUSABLE[:] = [each for each in _REUSABLE if each.all in dist.distributed_c10d._world.pg_map]
            left = {each.all.group_name: each for each in _REUSABLE if each.kind == kind}
            shared = set.intersection(*map(set, gathered([*left], device, parent)))  # a failed rank has left none
            if shared:
                groups = left[min(shared)]
                _REUSABLE.remove(groups)
                return groups
        members: dict[Among, tuple[list[list[int]], int]] = {"all": ([ranks], 0)}
        if hierarchy:
            nodes = [ranks[first : first + local] for first in range(0, len(ranks), local)]
            members["node"] = nodes, mine // local
            members["peers"] = [ranks[each::local] for each in range(local)], mine % local
        among: dict[Among, dist.ProcessGroup] = {}
        made = cls(among, mine, len(ranks), device, local, timeout, kind)
        with on_failure(made._destroy):
            for who, each in members.items():
                among[who] = _own_group(*each, parent, timeout)
            checked = dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]  # at run time
            if second and parent is None and not checked and len(ranks) > 1 and not on_gpus(made.all):
                made = replace(made, second_groups=cls.make(None, device, timeout, local, hierarchy))
        return made

    def connect(self) -> None:
        """Creates NCCL's communicators and connections now, not in the first backward pass. A collective."""
        for group in self.among.values() if self.device.type == "cuda" else ():
            if "nccl" in dist.get_backend_config(group):
                payload = torch.zeros(dist.get_world_size(group), dtype=torch.uint8, device=self.device)
                dist.all_to_all_single(torch.empty_like(payload), payload, group=group)
                all_gather(payload, torch.zeros_like(payload[:1]), group)

    def destroy(self, idle: bool = True, failed: bool = False) -> None:
        """Destroys the groups; but groups of only some ranks are kept for the next state of the same ranks.

        If those were destroyed, torch 2.9 would reuse their names, under which the store has the old addresses.

        NCCL waits until all ranks of a group destroy it. If only this rank failed, they never do: so a thread waits,
        and the caller continues after ``PATIENCE`` seconds, with the error that ended the run. Groups stay open unless
        they are ``idle``, without a collective in progress. After one has ``failed``, they are not reused.
        """
        if not idle:
            _STUCK.append(self)
        else:
            self.forget_replies()
        if not idle or self.all not in dist.distributed_c10d._world.pg_map:
            return  # the caller destroyed all groups
        if self.kind is not None:
            if not failed:
                _REUSABLE.append(self)
        elif not on_gpus(self.all):
            self._destroy()
        else:
            waits = threading.Thread(target=self._destroy, name="lightning_topk-destroy", daemon=True)
            waits.start()
            waits.join(PATIENCE)

    def _destroy(self) -> None:
        if self.second_groups is not None:
            self.second_groups._destroy()
        for group in reversed([*self.among.values()]):
            with suppress(KeyError, ValueError):  # the caller may destroy all groups meanwhile
                dist.destroy_process_group(group)


_STUCK: list[Groups] = []
"""Groups with an unfinished collective after an error: ``dist.destroy_process_group()`` would wait for it if nothing
referred to them (torch 2.14)."""
_REUSABLE: list[Groups] = []
"""Unused groups of some of the ranks."""


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    """Timeout of a group's collectives. Default: the timeout of the group of all ranks."""
    group = group or dist.group.WORLD
    assert group is not None
    with suppress(AttributeError, RuntimeError):  # not every backend has this option
        return group._get_backend(group._device_types[0]).options._timeout
    return dist.distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend(group)))


def on_gpus(group: dist.ProcessGroup | None) -> bool:
    """Whether ranks exchange CUDA tensors over NCCL: False if gloo runs all collectives of the group here."""
    backends = dist.get_backend_config(group)
    return "cpu:gloo" not in backends or ("nccl" in backends and torch.cuda.is_available())


def all_gather(
    into: Tensor, payload: Tensor, group: dist.ProcessGroup | None = None, background: bool = False
) -> dist.Work | None:
    """Gathers and concatenates the payloads of all ranks; torch has two names for it, and deprecates the older."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(into, payload, group=group, async_op=background)


def _own_group(
    members: Sequence[list[int]], mine: int, parent: dist.ProcessGroup | None, timeout: timedelta | None
) -> Any:
    """Creates several groups, with each rank in one of them, and returns this rank's group.

    If ``parent`` is None, every rank creates all of them, in the same order. If not, the ranks of a group create it
    without the others. If the default group is bound to a device, by ``init_process_group(device_id=)`` or by NCCL in
    torch 2.15, a new group would be split off its communicator, and every rank of the default group must join a split.
    Ranks that do not train this model never get here. So the device is hidden: the group creates its own communicator.
    """
    new_group: Any = dist.new_group  # its annotation allows for ranks outside the group
    if parent is None:
        return [new_group(ranks, timeout, group_desc=DESCRIPTION) for ranks in members][mine]
    default, backend = dist.group.WORLD, dist.get_backend(parent)
    assert default is not None
    device, default.bound_device_id = default.bound_device_id, None
    try:
        return new_group(
            members[mine], timeout, backend, use_local_synchronization=True, group_desc=DESCRIPTION, device_id=device
        )
    finally:
        default.bound_device_id = device


@contextmanager
def on_failure(undo: Callable[[], Any]) -> Iterator[None]:
    """Calls ``undo`` if any exception ends this context, even Ctrl+C: other ranks may wait for this one."""
    try:
        yield
    except BaseException:
        undo()
        raise


# ------------------------------------------------------------------------------------------------ agreement


def connect(
    config: TopKConfig,
    device: torch.device,
    process_group: dist.ProcessGroup | None,
    timeout: timedelta | None,
    local_world_size: int | None,
) -> tuple[Groups, TopKConfig, str]:
    """Creates this rank's groups and agrees with the other ranks on settings and nodes. A collective.

    Returns the groups, the settings resolved for these ranks, and a message for the user, which may be empty.
    """
    check_count("local_world_size", local_world_size)
    timeout = timeout or timeout_of(process_group)
    world, summary = dist.get_world_size(process_group), {**config.summary(), "local_world_size": local_world_size}
    gpus = on_gpus(process_group)
    if config.adapts_momentum:
        # Optimizer steps with and without a compiler differ in rounding. A compiler may be installed but not work.
        needs, works = "numba" if device.type == "cpu" else "triton", ops.fast(device) is not None
        summary[needs] = "in use" if works else "broken" if needs in ops.FAILED else "missing"
    remedy = "Pass the same settings on every rank, and install the same packages."
    with every_rank("comparing settings", "Every rank must attach its model: see the output of the others."):
        check_agreement(summary, remedy, device, process_group)
    local, uneven = local_world_size or 1, ""
    if world > 1 and local_world_size is None:
        local, uneven = _local_world_size(config, device, process_group)
    elif config.topology is None and world % local:
        local, uneven = 1, f"{world} ranks are not whole nodes of {local}"
    if world == 1:
        local = 1
    alone = world == 1 and not config.momentum  # worker momentum needs a residual
    agreed = config.dense if alone else config.resolve(world, local, gpus)
    by_node = agreed.by_node and 1 < local < world
    groups = Groups.make(process_group, device, timeout, local, by_node, second=agreed.compresses)
    with on_failure(lambda: groups.destroy(failed=True)):
        # A rank that closed its groups before all have connected would break the others' connections.
        gathered(None, device, process_group)
    if uneven and (gpus or local_world_size) and config.topology is None:
        uneven = (
            f"lightning_topk: topology='sharded' is in force, since {uneven}. On nodes with equal numbers of "
            "consecutive ranks, 'hierarchical' sends less between nodes: pass local_world_size=, the ranks per node."
        )
        return groups, agreed, uneven
    return groups, agreed, ""


def _local_world_size(config: TopKConfig, device: torch.device, group: dist.ProcessGroup | None) -> tuple[int, str]:
    """Ranks per node from LOCAL_WORLD_SIZE, or 1 with the reason if it does not fit these ranks."""
    told: list[str] = gathered(os.environ.get("LOCAL_WORLD_SIZE", "1"), device, group)
    everyone, local = len(told) == dist.get_world_size(), int(told[0]) if told[0].isdecimal() else 0
    if everyone and len(set(told)) == 1 and local and len(told) % local == 0:
        return local, ""
    words = f"LOCAL_WORLD_SIZE is [{', '.join(told)}] on {len(told)} of {dist.get_world_size()} ranks"
    if config.by_node:
        raise ValueError(
            f"topology={config.topology!r} needs the same number of ranks on every node, but {words}. Pass "
            "local_world_size=, or topology='sharded'."
        )
    return 1, words
