"""An adapter for another wrapper, here none: the gradients of a bare module are exchanged after its backward pass."""

import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
from groups import on_ranks
from ranks import Run, gradient

from lightning_topk import TopKConfig
from lightning_topk.runtime import state as runtime_state
from lightning_topk.runtime.state import HookState
from lightning_topk.schedule import ExponentialWarmup
from lightning_topk.volume import volume

PASSES = 10


def exchange_gradients(state, buckets):
    """Replaces the gradients of a backward pass by their means; every rank has the same buckets of parameters."""
    state.begin_pass(waits=True)  # nothing of backward is left to hide the exchange
    futures = []
    for number, bucket in enumerate(buckets):
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        futures.append(state.exchange(bucket, flat, name=f"bucket {number}"))
    state.end_pass()
    for bucket, future in zip(buckets, futures, strict=True):
        for parameter, mean in zip(bucket, future.wait().split([p.numel() for p in bucket]), strict=True):
            parameter.grad.copy_(mean.view_as(parameter))


@pytest.mark.parametrize("settings", [{"ratio": 0.05}, {"saving": 8}], ids=str)
@on_ranks(2)
def test_an_adapter_of_three_calls_keeps_the_laws(rank, world, settings):
    net = ranks.four_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    buckets = [tuple(net[n].parameters()) for n in reversed(range(len(net)))]
    config = TopKConfig(**settings)
    state = HookState(config, torch.device("cpu"))
    state.buckets.learn_names({parameter: name for name, parameter in net.named_parameters()})
    run = Run(rank, ranks.four_layers(), net, net, state)
    with ranks.Counted() as counted, mock.patch.object(runtime_state, "Pass", wraps=runtime_state.Pass) as begun:
        for step in range(PASSES):
            counted.clear()
            run.backward(step)
            exchange_gradients(state, buckets)
            run.received[-1] = gradient(net)
            optimizer.step()
            reported, sizes = state.report().bytes, [[p.numel() for p in bucket] for bucket in buckets]
            plan = volume(config, sizes, world, rank, settled=step > 0)
            run.sent.append({"counted": sum(counted.bytes.values()), "reported": reported.sent})
            run.planned.append(dict.fromkeys(run.sent[-1], plan.sent))
    saved, same = ranks.shared(state.state_dict())["parameters"], ranks.alike(ranks.weights(net))
    _, left = run.check(settled=1)
    state.close()
    assert same
    assert left.any()
    assert saved.keys() == {name for name, _ in net.named_parameters()}
    assert [call.args[0] for call in begun.call_args_list] == [*range(PASSES)], "each pass begins once"
    assert state.steps == PASSES
    state = HookState(config, torch.device("cpu"))
    for call in (state.end_pass, lambda: state.exchange(buckets[0], torch.zeros(1), "early")):
        with pytest.raises(RuntimeError, match="was called outside a pass: call begin_pass before its first gradient"):
            call()
    state.close()


def test_contributing_shows_this_adapter():
    shown = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    assert f"```python\n{inspect.getsource(exchange_gradients)}```\n" in shown


def train_through_changes(rank: int, settings: dict[str, Any], anew: bool) -> tuple[list[Any], list[Any]]:
    """Trains a net while all changes that may change, by gradients at random; returns its weights and bytes."""
    torch.manual_seed(0)
    net, random = ranks.four_layers(), torch.Generator().manual_seed(rank)
    names, layers = {p: name for name, p in net.named_parameters()}, [tuple(layer.parameters()) for layer in net]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)]
    state = HookState(
        TopKConfig(**settings), torch.device("cpu"), optimizers=lambda: optimizers, max_norm=0.5, epoch=lambda: 0
    )
    state.buckets.learn_names(names)
    buckets, weights, sent = layers[::-1], [], []
    for step in range(36):
        if step == 2:
            optimizers[0].param_groups[0]["lr"] *= 2
        elif step == 4:  # a parameter is frozen, as FSDP2's adapter sees it
            layers[0][0].requires_grad_(False)
            state.buckets.learn_names(names)
            buckets = [*layers[:0:-1], layers[0][1:]]
        elif step == 6:
            layers[0][0].requires_grad_(True)
            state.buckets.learn_names(names)
            buckets = layers[::-1]
        elif step == 18:  # after bytes were shared out
            buckets = [layers[3] + layers[2], layers[1] + layers[0]]
        elif step == 20:
            group = optimizers[0].param_groups[0]
            group["params"], other = group["params"][:2], group["params"][2:]
            optimizers[0].add_param_group({"params": other, "lr": 0.05})
        elif step == 22:
            optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-3)]
        elif step == 24:
            state.load_state_dict(ranks.shared(state.state_dict()))
        elif step == 28:
            net.bfloat16()
            optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)]
        now = buckets[step % 2 :] if step >= 30 else buckets  # other buckets in turn
        exchanged = {p for bucket in now for p in bucket}
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=random).to(p.dtype) if p in exchanged else None
        exchange_gradients(state, now)
        if step not in (8, 26):
            optimizers[0].step()
        if anew:
            state.optimizers._members = ()
            state.buckets._together.clear()
            for bucket in state.buckets._known.values():
                bucket.alike = None
                if bucket.plan is not None:
                    bucket.plan.__dict__.pop("_fixed", None)
            state.telemetry._exchanged = []
        weights.append(ranks.weights(net).clone())
        sent.append(state.report().bytes)
    state.close()
    return weights, sent


@pytest.mark.parametrize("settings", [{"saving": 8}, {"ratio": ExponentialWarmup(0.05, steps=30)}], ids=str)
@on_ranks(2)
def test_what_is_prepared_follows_every_change(rank, world, settings):
    """A run that prepares everything in every pass has the same bits and bytes."""
    (weights, sent), (others, theirs) = (train_through_changes(rank, settings, anew) for anew in (False, True))
    assert all(map(torch.equal, weights, others))
    assert all(map(ranks.alike, weights))
    assert sent == theirs
