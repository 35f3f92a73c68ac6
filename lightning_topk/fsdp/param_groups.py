"""The parameter groups of an FSDP2 model, and the proxies for their shards in buckets.

torch offers no list of what an all-reduce hook's tensor holds. So this reads FSDP's own account of its parameter
groups, which is private; nothing else here does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_topk.runtime.buckets import names_of
from lightning_topk.runtime.exchanger import Bucket
from lightning_topk.runtime.memory.by_parameter import Residuals

_PROXIES: WeakKeyDictionary[Residuals, dict[str, Tensor]] = WeakKeyDictionary()


def proxies_of(residuals: Residuals) -> dict[str, Tensor]:
    """The proxies by name of those residuals: a model that is attached again finds its own."""
    return _PROXIES.setdefault(residuals, {})


class ParamGroup:
    """A group of parameters whose gradients FSDP reduces together.

    A bucket is a tuple of tensors with an identity, a size, a dtype and a device. A sharded parameter has the size of
    the whole one, so a *proxy* takes its place: ``[elements of the padded shard]`` in the dtype of the reduced
    gradient, without memory of its own.

    Args:
        module: One of the modules that ``fully_shard`` wrapped together.
        group: FSDP's own account of the group, which is private: torch offers no other list of what a hook's tensor
            holds.
        names: The sharded parameters' names.
        known: Stand-ins by name, of an earlier state of the same model; this adds to it.
    """

    def __init__(self, module: FSDPModule, group: Any, names: Mapping[Tensor, str], known: dict[str, Tensor]) -> None:
        self.module, self._group = module, group
        self.proxies: dict[Tensor, Any] = {}
        """FSDP's account of each parameter, by proxy, whether it is trained now or may be later."""
        self.names: dict[Tensor, str] = {}
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            name, size = names[sharded], parameter.padded_sharded_param_size.numel()
            if name not in known or known[name].numel() != size:
                policy = parameter.mp_policy
                dtype = policy.reduce_dtype or policy.param_dtype or sharded.dtype
                known[name] = torch.zeros((), dtype=dtype, device=group.device).expand(size)
            self.proxies[known[name]], self.names[known[name]] = parameter, name
        self.ranks: list[int] = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
        """The ranks to which the parameters are dealt."""
        self.stream: torch.cuda.Stream | None = None
        """On a GPU, the stream on which the last gradient was computed."""
        self._used: set[Any] = set()  # parameters with a gradient that was not reduced yet
        self._watches: list[RemovableHandle] = []

    def sharded(self, proxy: Tensor) -> DTensor:
        """The parameter as the model has it between two passes, and as optimizers know it."""
        parameter: DTensor = self.proxies[proxy].sharded_param
        return parameter

    @property
    def trained(self) -> list[Tensor]:
        """The proxies of parameters that are trained now; theirs alone require a gradient."""
        for proxy, parameter in self.proxies.items():
            if proxy.requires_grad != parameter.sharded_param.requires_grad:
                proxy.requires_grad_(parameter.sharded_param.requires_grad)
        return [proxy for proxy in self.proxies if proxy.requires_grad]

    def __str__(self) -> str:
        first, *others = self.names.values()
        return first if not others else f"{first} and {len(others)} more"

    def watch_use(self) -> None:
        """Notes from now on which parameters get a gradient. A collective of the node: all are gathered, once."""
        self.module.unshard()
        for parameter in self.proxies.values():
            # Weakly: the garbage collector does not see through a tensor's hooks, and the model would never be freed.
            note = partial(_note, ref(self), ref(parameter))
            whole = parameter._unsharded_param
            if whole.is_floating_point():  # others never get a gradient
                trained = whole.requires_grad
                self._watches.append(whole.requires_grad_().register_post_accumulate_grad_hook(note))
                whole.requires_grad_(trained)
        self.module.reshard()

    def stop(self) -> None:
        """Ends watching. The hook stays: FSDP would go on without it, and replicas go different ways."""
        for watch in self._watches:
            watch.remove()

    def bucket(self, g: Tensor) -> Bucket:
        """The parameters whose gradients a hook's tensor holds, in its order: all, or those that got one.

        Raises:
            RuntimeError: Its size says that it holds others.
        """
        parameters = self._group.fsdp_params
        order = getattr(self._group, "_reduce_scatter_param_indices", None)  # torch 2.15 sorts them by dtype
        ordered = parameters if order is None else [parameters[number] for number in order]
        member = {parameter: proxy for proxy, parameter in self.proxies.items()}
        trained, used = (
            tuple(member[parameter] for parameter in ordered if parameter in those)
            for those in ({self.proxies[each] for each in self.trained}, self._used.copy())
        )
        self._used.clear()
        for bucket in (trained, used):
            if sum(each.numel() for each in bucket) == g.numel():
                return bucket
        raise RuntimeError(
            f"the gradient of {self} has {g.numel()} elements on this rank, but its parameters that are to be trained "
            f"have {sum(each.numel() for each in trained)}. If parameters were replaced since attach, close the state "
            "and attach again. If they were frozen or unfrozen, do that before the forward pass."
        )

    @property
    def skips_all_reduce(self) -> bool:
        """Whether a part of the reduction is switched off, so that replicas would differ."""
        return bool(self._group.reduce_grads and not self._group.all_reduce_grads)

    @property
    def user_divides(self) -> bool:
        """Whether ``set_gradient_divide_factor`` was called: then the exchange returns a sum, which FSDP divides."""
        return self._group.gradient_divide_factor is not None

    def node_bytes(self, g: Tensor) -> int:
        """Bytes that FSDP sends inside the node for a forward and a backward pass, by all its ranks together.

        The reduce-scatter of the gradient, and an all-gather of the parameters for each pass that needs them anew.
        """
        ranks, again = len(self.ranks), self._group.post_forward_mesh_info is not None
        gathered = sum(
            each.padded_sharded_param_size.numel() * (each.param_dtype or each.orig_dtype).itemsize
            for each in self._group.fsdp_params
        )
        return ranks * (ranks - 1) * (g.nbytes + (1 + again) * int(gathered))

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced."""
        device: torch.device = self._group.device
        return device

    @property
    def root(self) -> Any:
        """FSDP's state of the module whose forward pass this group is a part of."""
        return self.module._get_fsdp_state()._state_ctx.all_states[0]

    @property
    def hook(self) -> Any:
        """What FSDP calls with each reduced gradient; None if nothing."""
        return self._group._all_reduce_hook

    def set_hook(self, hook: Callable[[Tensor], None], stream: torch.cuda.Stream | None) -> None:
        """Has FSDP call a hook with each reduced gradient, on that stream."""
        self.module.set_all_reduce_hook(hook, stream=stream)

    def later_divided_by(self, proxy: Tensor) -> float:
        """By what FSDP divides the hook's result: with float16, whose sums could overflow, and where it only sums.

        Residuals have the hook's param_groups; in a checkpoint they have the gradient's.
        """
        risky = proxy.dtype not in (torch.float32, torch.bfloat16)
        if not risky and not self._group.force_sum_reduction_for_comms:
            return 1.0
        factor = self._group.gradient_divide_factor or len(self.ranks)  # as torch's _get_gradient_divide_factors
        before = 1
        while risky and factor % before == 0 and factor / before > before:
            before *= 2
        return float(factor / before)


def _note(param_group: ref[ParamGroup], used: ref[Any], _: Tensor) -> None:
    """Notes that a parameter of a group got a gradient."""
    here = param_group()
    if here is not None:
        here._used.add(used())
        if here.device.type == "cuda":
            here.stream = torch.cuda.current_stream(here.device)


def param_groups_of(model: torch.nn.Module, known: dict[str, Tensor]) -> list[ParamGroup]:
    """The groups of parameters of an FSDP2 model, in the order of its modules.

    Args:
        model: The model.
        known: See :class:`ParamGroup`.

    Raises:
        ValueError: Replicas are exchanged by FSDP itself, modules have several meshes, or parameters are not sharded.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a backward pass that failed may have left parameters gathered
    names = names_of(model)
    param_groups, seen = [], set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        one = getattr(state, "_fsdp_param_groups", None)  # torch 2.9 has one group a module
        groups = [group for group in ([state._fsdp_param_group] if one is None else one) if group is not None]
        if len(groups) > 1:
            raise ValueError(
                f"the module {name!r} is sharded on {len(groups)} meshes, and FSDP2 has one hook for them. Wrap its "
                "parts by fully_shard one by one, all on the mesh of the node."
            )
        for group in groups:
            if id(group) not in seen:
                seen.add(id(group))
                _check_mesh(group, name)
                param_groups.append(ParamGroup(module, group, names, known))
    found = {parameter for param_group in param_groups for parameter in param_group.names.values()}
    strangers = [name for parameter, name in names.items() if parameter.requires_grad and name not in found]
    if strangers:
        raise ValueError(
            f"the parameter {strangers[0]!r} (one of {len(strangers)}) is not sharded by fully_shard, so nobody would "
            "reduce its gradient. Wrap the module that holds it too, or freeze it."
        )
    meshes = {tuple(param_group.ranks) for param_group in param_groups if param_group.trained}
    if len(meshes) > 1:
        raise ValueError(
            f"the model is sharded on several meshes, of the ranks {' and '.join(map(str, sorted(meshes)))}: their "
            "replicas are on different ranks. Shard all modules on one mesh, that of the node."
        )
    return [param_group for param_group in param_groups if param_group.proxies and tuple(param_group.ranks) in meshes]


class EndOfBackward:
    """Has FSDP call back when a backward pass has ended.

    Autograd's own callbacks come too early where activations are checkpointed with ``use_reentrant=True``: each block
    is then a backward pass inside the other. FSDP calls the last callback of the root alone, which may be outside the
    model, and is known after a forward pass.

    Args:
        model: The model.
        ended: Is called.
    """

    _NAME = "_root_post_backward_final_callback"

    def __init__(self, model: torch.nn.Module, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._parts: dict[Any, partial[None]] = {}  # what they call now; two models may share some
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._watch(module._get_fsdp_state())

    def is_seen(self, param_group: ParamGroup) -> bool:
        """Whether FSDP will call back at the end of this backward pass; from the next pass on it will."""
        root = param_group.root
        seen = root in self._parts
        self._watch(root)
        return seen

    def stop(self) -> None:
        """Ends that."""
        for part, callback in self._parts.items():
            if getattr(part, self._NAME) is callback:
                setattr(part, self._NAME, callback.args[0])  # what it called before
        self._parts = {}

    def _watch(self, part: Any) -> None:
        if part not in self._parts:
            self._parts[part] = partial(self._after, getattr(part, self._NAME))
            setattr(part, self._NAME, self._parts[part])

    def _after(self, last: Callable[[], None]) -> None:
        last()
        if self._parts and not any(part._state_ctx.post_backward_final_callback_queued for part in self._parts):
            self._ended()


def _check_mesh(group: Any, name: str) -> None:
    """Refuses a mesh on which FSDP exchanges replicas' gradients itself, or does not shard."""
    if getattr(group.mesh_info, "replicate_mesh_dim", None) is not None:
        raise ValueError(
            f"the module {name!r} is on a mesh {tuple(group.mesh_info.mesh.shape)} with a dimension of replicas, whose "
            "gradients FSDP all-reduces whole. Pass fully_shard the dimension of a node alone, such as "
            "mesh=mesh['shard'], and attach(..., process_group=mesh['replicate'])."
        )
