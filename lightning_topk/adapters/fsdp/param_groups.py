"""The parameter groups of an FSDP2 model, and the proxies for their shards in buckets.

torch does not say which parameters an all-reduce hook's tensor holds, nor when a backward pass ends. So this module
reads FSDP's private parameter groups; no other module does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_topk.adapters.checks import watch_gradients
from lightning_topk.bucket import names_of
from lightning_topk.runtime.state import HookState


class ParamGroup:
    """A group of parameters whose gradients FSDP reduces together.

    A sharded parameter reports the size of the full one. So a *proxy* takes its place in buckets: ``[elements of the
    padded shard]`` in the dtype of the reduced gradient, without memory of its own.

    ``group`` is FSDP's private object for the group, ``module`` one of the modules that ``fully_shard`` wrapped
    together. ``known`` has an earlier state's proxies of the same model, by name; new ones are added.
    """

    def __init__(self, module: FSDPModule, group: Any, names: Mapping[Tensor, str], known: dict[str, Tensor]) -> None:
        self.module, self._group = module, group
        self.proxies: dict[Tensor, Any] = {}  # FSDP's private object for each parameter, trained or frozen, by proxy
        self.names: dict[Tensor, str] = {}
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            name, size = names[sharded], parameter.padded_sharded_param_size.numel()
            policy = parameter.mp_policy
            dtype = policy.reduce_dtype or policy.param_dtype or sharded.dtype
            proxy = torch.zeros((), dtype=dtype, device=group.device).expand(size)
            if name in known and known[name].numel() == size:
                known[name].data = proxy  # the earlier model may have had another dtype
            else:
                known[name] = proxy
            self.proxies[known[name]], self.names[known[name]] = parameter, name
        self.shards: dist.ProcessGroup = group.mesh_info.shard_process_group
        self.ranks: list[int] = dist.get_process_group_ranks(self.shards)
        self.device: torch.device = group.device  # on which gradients are reduced
        self.stream: torch.cuda.Stream | None = None  # on a GPU, the one that computed the last gradient
        self._used: set[Any] = set()  # parameters with a gradient that is not reduced yet
        self._waiting: tuple[tuple[Tensor, ...], Tensor | None] = (), None  # accumulated, not exchanged
        self._without: list[DTensor] = []  # sharded parameters that got zeros in its place, and had no gradient
        self.watches: list[RemovableHandle] = []  # to remove when the state is closed

    def sharded(self, proxy: Tensor) -> DTensor:
        """The sharded parameter, as in the model between two passes and in optimizers."""
        return self.proxies[proxy].sharded_param

    @property
    def trained(self) -> list[Tensor]:
        """The proxies of the parameters that are trained now; only these require a gradient."""
        for proxy, parameter in self.proxies.items():
            if proxy.requires_grad != parameter.sharded_param.requires_grad:
                proxy.requires_grad_(parameter.sharded_param.requires_grad)
        return [proxy for proxy in self.proxies if proxy.requires_grad]

    def __str__(self) -> str:
        first, *others = self.names.values()
        return first if not others else f"{first} and {len(others)} more"

    def watch_use(self) -> None:
        """Tracks which parameters get a gradient. A collective of the node, since it unshards all of them once."""
        self.module.unshard()
        for parameter in self.proxies.values():
            # Weak references: the garbage collector does not see a tensor's hooks, and would never free the model.
            self.watches += watch_gradients(parameter._unsharded_param, partial(_note, ref(self), ref(parameter)))
        self.module.reshard()

    def bucket(self, g: Tensor) -> tuple[Tensor, ...]:
        """The parameters whose gradients a hook's tensor holds, in order: all trained ones, or those with a gradient.

        ``g`` ``[elements]`` is this rank's shard of the gradient. Refuses a size that fits neither.
        """
        parameters = self._group.fsdp_params
        order = getattr(self._group, "_reduce_scatter_param_indices", None)  # torch 2.15 sorts them by dtype
        ordered = parameters if order is None else [parameters[number] for number in order]
        proxy_of = {parameter: proxy for proxy, parameter in self.proxies.items()}
        trained = tuple(proxy_of[each] for each in ordered if each.sharded_param.requires_grad)
        used = tuple(proxy_of[each] for each in ordered if each in self._used)
        self._used.clear()
        for bucket in (trained, used):
            if sum(each.numel() for each in bucket) == g.numel():
                return bucket
        raise RuntimeError(
            f"the gradient of {self} has {g.numel()} elements on this rank, but its trained parameters "
            f"have {sum(each.numel() for each in trained)}. If parameters were replaced since attach, close the state "
            "and attach again. If they were frozen or unfrozen, do that before the forward pass."
        )

    @property
    def exchanges(self) -> bool:
        """Whether gradients are exchanged now: not after ``set_requires_all_reduce(False)``."""
        return bool(self._group.all_reduce_grads)

    def accumulate_(self, bucket: tuple[Tensor, ...], g: Tensor) -> None:
        """Adds a gradient that is not exchanged to those kept before, and gives FSDP zeros in its place."""
        self.add_accumulated_(bucket, g)
        self._waiting = bucket, g.clone()
        sharded = map(self.sharded, bucket)
        self._without = [parameter for parameter in sharded if parameter.grad is None]
        g.zero_()

    def add_accumulated_(self, bucket: tuple[Tensor, ...], g: Tensor) -> None:
        """Adds the gradients of earlier passes that were not exchanged to this one."""
        earlier = self._group._partial_reduce_output  # FSDP forgets it when the hook has returned
        if earlier is None:
            return
        if set(self._waiting[0]) != set(bucket):
            raise RuntimeError(
                f"backward passes gave gradients to different parameters of {self}, so their shards cannot be "
                "accumulated. Use the same parameters in each, call set_reduce_scatter_unused_params(True) on the "
                "FSDP modules (torch 2.14 and later), or accumulate with set_requires_gradient_sync(False)."
            )
        g.add_(earlier)

    def end_pass(self) -> None:
        """Stores the accumulated gradient where HSDP keeps its own and ``reset_iter_state`` drops it; removes zeros."""
        bucket, accumulated = self._waiting
        if accumulated is not None:
            self._group._partial_reduce_output, self._waiting = accumulated, (bucket, None)
        while self._without:
            self._without.pop().grad = None

    @property
    def user_divides(self) -> bool:
        """Whether ``set_gradient_divide_factor`` was called: then the exchange returns a sum, which FSDP divides."""
        return self._group.gradient_divide_factor is not None

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass of the root module that includes this group has begun and not ended."""
        return self.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued

    @property
    def has_hook(self) -> bool:
        """Whether FSDP calls a hook with the gradients, other than the hook of a closed state."""
        hook = self._group._all_reduce_hook
        user = getattr(getattr(hook, "func", None), "__self__", None)
        return hook is not None and not (isinstance(user, HookState) and user.groups is None)

    def later_divided_by(self, proxy: Tensor) -> float:
        """Factor by which FSDP divides the hook's result: with float16, whose sums could overflow, or if it only sums.

        Residuals have the units of the hook's tensor; in a checkpoint they have the gradient's.
        """
        group = self._group
        factors = group.gradient_divide_factor, group.force_sum_reduction_for_comms
        _, later, *_ = _get_gradient_divide_factors(self.shards, None, proxy.dtype, self.device.type, *factors)
        return later or 1.0


def _note(param_group: ref[ParamGroup], used: ref[Any], _: Tensor) -> None:
    """Records that a parameter of a group got a gradient."""
    here = param_group()
    if here is not None:
        here._used.add(used())
        if here.device.type == "cuda":
            here.stream = torch.cuda.current_stream(here.device)


def param_groups_of(model: torch.nn.Module, known: dict[str, Tensor]) -> list[ParamGroup]:
    """Returns the parameter groups of an FSDP2 model, in the order of its modules."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    for _, module in modules:
        module.reshard()  # a backward pass that failed may have left parameters gathered
    names, param_groups = names_of(model), dict[Any, ParamGroup]()
    for name, module in modules:
        group: Any = module._get_fsdp_state()._fsdp_param_group  # torch refuses a module on several meshes here
        if getattr(getattr(group, "mesh_info", None), "replicate_mesh_dim", None) is not None:
            raise ValueError(
                f"the module {name!r} is on a mesh {tuple(group.mesh_info.mesh.shape)} with a replicate dimension, "
                "over which FSDP all-reduces whole gradients. Pass fully_shard only the dimension inside a node, "
                "such as mesh=mesh['shard'], and attach(..., process_group=mesh['replicate'])."
            )
        if group is not None and group not in param_groups:
            param_groups[group] = ParamGroup(module, group, names, known)
    meshes = {tuple(param_group.ranks) for param_group in param_groups.values() if param_group.trained}
    if len(meshes) > 1:
        raise ValueError(
            f"the model is sharded on several meshes, of the ranks {' and '.join(map(str, sorted(meshes)))}: their "
            "replicas are on different ranks. Shard all modules on one mesh, the node's."
        )
    return [each for each in param_groups.values() if each.proxies and tuple(each.ranks) in meshes]


_watching: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The states that FSDP calls back at the end of a backward pass, in the order in which every rank made them."""


def watch_backward(state: Any) -> None:
    """Makes FSDP call ``state.root_ended`` when a root module has ended its backward pass.

    Autograd's own callbacks come too early if activations are checkpointed with ``use_reentrant=True``: each block is
    then a nested backward pass. FSDP has a final callback, of the root only. The root may be outside the model, and is
    known after a forward pass; so the callbacks of all modules are replaced, once for the life of the process.
    """
    _replace_final_callback()
    _watching[id(state)] = state


@cache
def _replace_final_callback() -> None:
    last = FSDPState._root_post_backward_final_callback

    def final(root: FSDPState) -> None:
        last(root)
        for state in [*_watching.values()]:
            state.root_ended()

    FSDPState._root_post_backward_final_callback = final  # type: ignore[assignment, method-assign]
