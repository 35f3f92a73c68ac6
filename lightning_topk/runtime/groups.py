"""The process groups of a rank, and the checks that all ranks agree before they exchange gradients."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.core import ops
from lightning_topk.core.requests import Among

DESCRIPTION = "lightning_topk"
"""Group description shown in torch's errors: NCCL's watchdog names the group whose collective timed out."""
PATIENCE = 5.0
"""Seconds to wait at the end of training for collectives that another rank may never join."""


@dataclass(frozen=True)
class Groups:
    """The process groups of a rank.

    Attributes:
        all: All ranks that exchange gradients.
        node: Ranks of this node; None without a hierarchy.
        peers: Ranks with the same local rank on every node; None without a hierarchy.
        local: Ranks per node.
        some: Whether these are only some of all ranks.
        timeout: Timeout of their collectives.
        second_groups: Groups of the same ranks for a second exchange at the same time; None if there are none.
    """

    all: dist.ProcessGroup
    node: dist.ProcessGroup | None = None
    peers: dist.ProcessGroup | None = None
    local: int = 1
    some: bool = False
    timeout: timedelta | None = None
    second_groups: Groups | None = None
    place: str = field(init=False, default="")
    """This rank and their number, in words: known also once a group is gone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", f"rank {dist.get_rank(self.all)} of {dist.get_world_size(self.all)}")

    @classmethod
    def make(
        cls,
        parent: dist.ProcessGroup | None,
        timeout: timedelta | None,
        local: int = 1,
        hierarchy: bool = False,
        second: bool = False,
    ) -> Groups:
        """Creates new groups, separate from ``parent``. A collective.

        Args:
            parent: Group with the ranks and the backend. Default: all ranks. If these are only some of all ranks,
                groups that an earlier state has left are reused.
            timeout: Timeout of collectives. Default: the backend's own.
            local: Ranks per node; they are consecutive.
            hierarchy: Whether to create groups inside nodes and between them.
            second: Whether to create second groups too, if these have all ranks and only use gloo. NCCL needs none: on
                a GPU one side stream runs all exchanges. There are none either if torch checks collectives before it
                starts them: see :mod:`lightning_topk.runtime.lanes`.
        """
        left = parent and _left_by_an_earlier_state(parent, timeout or timeout_of(parent), local if hierarchy else None)
        if left:
            return replace(left, local=local)
        ranks, mine = dist.get_process_group_ranks(parent or dist.group.WORLD), dist.get_rank(parent)
        made = cls(_own_group([ranks], 0, parent, timeout), local=local, some=parent is not None, timeout=timeout)
        if hierarchy:
            nodes = [ranks[first : first + local] for first in range(0, len(ranks), local)]
            node = _own_group(nodes, mine // local, parent, timeout)
            peers = _own_group([ranks[each::local] for each in range(local)], mine % local, parent, timeout)
            made = replace(made, node=node, peers=peers)
        checked = dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]  # exported at run time
        if second and not made.some and not checked and len(ranks) > 1 and _only_gloo(made.all):
            made = replace(made, second_groups=cls.make(None, timeout, local, hierarchy))
        return made

    def connect(self, device: torch.device) -> None:
        """Creates NCCL's communicators and connections now, not in the first backward pass. A collective.

        Args:
            device: The device of this rank's gradients.
        """
        for group in (self.all, self.node, self.peers) if device.type == "cuda" else ():
            if group is not None and "nccl" in dist.get_backend_config(group):
                payload = torch.zeros(dist.get_world_size(group), dtype=torch.uint8, device=device)
                dist.all_to_all_single(torch.empty_like(payload), payload, group=group)
                all_gather(payload, torch.zeros_like(payload[:1]), group)

    def among(self, who: Among) -> dist.ProcessGroup:
        """The group whose ranks take part in a request."""
        group = {"all": self.all, "node": self.node, "peers": self.peers}[who]
        assert group is not None, who
        return group

    def destroy(self, idle: bool = True, failed: bool = False) -> None:
        """Destroys the groups, but leaves groups of only some ranks to the next state of the same ranks.

        If those were destroyed, torch 2.9 would reuse their names, under which the store has the old addresses.

        NCCL waits until all ranks of a group destroy it. If only this rank failed, they never do: so a thread waits,
        and the caller continues after ``PATIENCE`` seconds, with the error that ended the run.

        Args:
            idle: Whether no collective is in progress. If one is, the groups are left open.
            failed: Whether a collective may have failed, so that the groups cannot be reused.
        """
        if not idle:
            _LEFT_OPEN.append(self)
        if not idle or not dist.is_initialized() or self.all not in dist.distributed_c10d._world.pg_map:
            return  # the caller destroyed all groups
        if self.some:
            if not failed:
                _LEFT.append(self)
        elif _only_gloo(self.all):
            self._destroy()
        else:
            waits = threading.Thread(target=self._destroy, name="lightning_topk-destroy", daemon=True)
            waits.start()
            waits.join(PATIENCE)

    def _destroy(self) -> None:
        if self.second_groups is not None:
            self.second_groups._destroy()
        for group in (self.peers, self.node, self.all):
            if group is not None:
                with suppress(KeyError, ValueError):  # the caller may destroy all groups meanwhile
                    dist.destroy_process_group(group)


_LEFT_OPEN: list[Groups] = []
"""Groups with an unfinished collective after an error: ``dist.destroy_process_group()`` would wait for it if nothing
referred to them (torch 2.14)."""
_LEFT: list[Groups] = []
"""Unused groups of some of the ranks."""


def _left_by_an_earlier_state(parent: dist.ProcessGroup, timeout: timedelta, local: int | None) -> Groups | None:
    """Finds unused groups of the same ranks as ``parent``, with nodes of ``local`` ranks if not None. A collective."""
    _LEFT[:] = [groups for groups in _LEFT if groups.all in dist.distributed_c10d._world.pg_map]
    alike = dist.get_process_group_ranks(parent), dist.get_backend(parent), timeout
    mine = {
        groups.all.group_name: groups
        for groups in _LEFT
        if (dist.get_process_group_ranks(groups.all), dist.get_backend(groups.all), timeout_of(groups.all)) == alike
        and local in (None, groups.node and dist.get_world_size(groups.node))
    }
    shared = set.intersection(*map(set, gathered([*mine], parent)))  # a rank whose exchange failed has left none
    if not shared:
        return None
    groups = mine[min(shared)]
    _LEFT.remove(groups)
    return groups


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    """Timeout of a group's collectives. Default: the timeout of the group of all ranks."""
    group = group or dist.group.WORLD
    assert group is not None
    with suppress(AttributeError, RuntimeError):  # not every backend has this option
        return group._get_backend(group._device_types[0]).options._timeout
    return dist.distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend(group)))


def _only_gloo(group: dist.ProcessGroup) -> bool:
    """Whether gloo runs all collectives of a group on this machine."""
    backends = dist.get_backend_config(group)
    return "cpu:gloo" in backends and not ("nccl" in backends and torch.cuda.is_available())


def all_gather(
    into: Tensor, payload: Tensor, group: dist.ProcessGroup | None = None, background: bool = False
) -> dist.Work | None:
    """Gathers and concatenates the payloads of all ranks; torch has two names for it, and deprecates the older."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(into, payload, group=group, async_op=background)


def on_gpus(group: dist.ProcessGroup | None) -> bool:
    """Whether the ranks of a group exchange CUDA tensors over NCCL. Default: all ranks."""
    group = group or dist.group.WORLD
    return group is not None and not _only_gloo(group)


@contextmanager
def _unbound() -> Iterator[torch.device | None]:
    """Lets some of the ranks create a group without the others; yields the device that the default group is bound to.

    If the default group is bound to a device, by ``init_process_group(device_id=)`` or by NCCL in torch 2.15, a new
    group would be split off its communicator. Every rank of the default group must join a split, but ranks that do not
    train this model never get here. A group that is not split off creates its own communicator.
    """
    default = dist.group.WORLD
    assert default is not None
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield device
    finally:
        default.bound_device_id = device


def _own_group(
    members: Sequence[list[int]], mine: int, parent: dist.ProcessGroup | None, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Creates several groups, with each rank in one of them, and returns this rank's group.

    If ``parent`` is None, every rank creates all of them, in the same order.
    """
    if parent is None:
        group = [dist.new_group(ranks, timeout, group_desc=DESCRIPTION) for ranks in members][mine]
    else:
        ranks, backend = members[mine], dist.get_backend(parent)
        with _unbound() as device:
            group = dist.new_group(
                ranks, timeout, backend, use_local_synchronization=True, group_desc=DESCRIPTION, device_id=device
            )
    return cast("dist.ProcessGroup", group)


def device_of(parameters: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Makes a model's GPU the current device: NCCL sends objects through it, and the default is GPU 0 on every rank."""
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gathers a picklable value from every rank. A collective."""
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, value, group=group)
    return rows


def check_agreement(mine: Mapping[str, Any], remedy: str, group: dist.ProcessGroup | None = None) -> None:
    """Checks that values are the same on every rank. A collective; if ranks differ, it raises on all of them."""
    rows = gathered(dict(mine), group)
    for rank, row in enumerate(rows):
        for name in [*rows[0], *(name for name in row if name not in rows[0])]:
            first, other = rows[0].get(name, "missing"), row.get(name, "missing")
            if first != other:
                raise ValueError(f"the ranks differ: {name} is {first} on rank 0 and {other} on rank {rank}. {remedy}")


# ------------------------------------------------------------------------------------------------ agreement


def connect(
    config: TopKConfig,
    process_group: dist.ProcessGroup | None,
    timeout: timedelta | None,
    local_world_size: int | None,
) -> tuple[Groups, TopKConfig, str]:
    """Creates this rank's groups and agrees with the other ranks on settings and nodes. A collective.

    Args:
        config: The user's settings.
        process_group: Group with the ranks and the backend. Default: all ranks.
        timeout: Timeout of collectives. Default: the timeout of ``process_group``.
        local_world_size: Ranks per node, if the user passed it.

    Returns:
        The groups, the settings resolved for these ranks, and a message for the user, which may be empty.

    Raises:
        ValueError: The ranks have different settings, or their nodes have different numbers of ranks.
    """
    timeout = timeout or timeout_of(process_group)
    world, summary = dist.get_world_size(process_group), {**config.summary(), "local_world_size": local_world_size}
    gpus = on_gpus(process_group)
    if config.adapts_momentum and (torch.cuda.is_available() or not gpus):
        # Steps of optimizers with and without a compiler differ in rounding. It may be installed and not work.
        needs, kind = ("triton", "cuda") if gpus else ("numba", "cpu")
        works = ops.fast(torch.device(kind)) is not None
        summary[needs] = "in use" if works else "broken" if needs in ops.FAILED else "missing"
    check_agreement(summary, "Pass the same settings on every rank, and install the same packages.", process_group)
    local, uneven = local_world_size or 1, ""
    if world > 1 and local_world_size is None:
        local, uneven = _local_world_size(config, process_group)
    elif config.topology is None and world % local:
        local, uneven = 1, f"{world} ranks are not whole nodes of {local}"
    if world == 1:
        local = 1
    alone = world == 1 and not config.momentum  # worker momentum needs a residual
    agreed = config.dense if alone else config.resolve(world, local, gpus)
    by_node = agreed.by_node and 1 < local < world
    groups = Groups.make(process_group, timeout, local, by_node, second=agreed.compresses)
    gathered(None, process_group)  # a rank that closed its groups now would break off connections of the others
    if not (uneven and (gpus or local_world_size) and config.topology is None):
        return groups, agreed, ""
    message = (
        f"lightning_topk: topology='sharded' is in force, since {uneven}. On nodes with equal numbers of consecutive "
        "ranks, 'hierarchical' sends less between nodes: pass local_world_size=, the number of ranks per node."
    )
    return groups, agreed, message


def _local_world_size(config: TopKConfig, group: dist.ProcessGroup | None) -> tuple[int, str]:
    """Ranks per node from LOCAL_WORLD_SIZE, or 1 with the reason if it does not fit these ranks."""
    told = gathered(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), group)
    everyone = len(told) == dist.get_world_size()
    if everyone and len(set(told)) == 1 and len(told) % told[0] == 0:
        return int(told[0]), ""
    words = f"LOCAL_WORLD_SIZE is {told} on {len(told)} of {dist.get_world_size()} ranks"
    if config.by_node:
        raise ValueError(
            f"topology={config.topology!r} needs the same number of ranks on every node, but {words}. Pass "
            "local_world_size=, or topology='sharded'."
        )
    return 1, words
