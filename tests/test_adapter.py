"""An adapter for another wrapper, here none: the gradients of a bare module are exchanged after its backward pass."""

import inspect
from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch
from groups import on_ranks
from ranks import Run, gradient

from lightning_topk import TopKConfig
from lightning_topk.runtime import state as runtime_state
from lightning_topk.runtime.state import HookState
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
