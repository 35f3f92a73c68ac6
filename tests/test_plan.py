"""``plan``: predicted bytes equal the counted ones, and it says nothing that it does not know."""

from __future__ import annotations

import re

import pytest
import torch
from groups import on_ranks
from ranks import attached
from test_bench import run
from test_pays import cells
from torch import nn

from lightning_topk.__main__ import main
from lightning_topk.config import TopKConfig
from lightning_topk.models import GPTS
from lightning_topk.plan import ddp_buckets, parameter_sizes
from lightning_topk.plan import run as plan
from lightning_topk.volume import format_bytes, volume


@on_ranks(2)
def test_buckets_are_those_that_ddp_builds(rank, world):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(300, 300) for _ in range(9)], nn.Linear(300, 2000))
    ddp, state = attached(net, {"bucket_cap_mb": 1}, ratio=0.01)
    for _ in range(3):
        ddp(torch.randn(2, 300)).sum().backward()
    found = [[p.numel() for p in bucket] for bucket in state.last_buckets]
    expected = ddp_buckets([p.numel() for p in net.parameters()], cap_mb=1)
    assert len(found) > 3
    # DDP takes gradients in their order of arrival: a layer's bias may come before its weight.
    assert [sorted(bucket) for bucket in found] == [sorted(bucket) for bucket in expected]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(10, 10), nn.Linear(5, 5).requires_grad_(False)


def test_a_users_module_is_counted():
    assert parameter_sizes(module="test_plan.Net") == [100, 10]


class Failing(nn.Module):
    def __init__(self) -> None:
        raise KeyError("x")


class Unreadable(nn.Module):
    def __init__(self) -> None:
        raise OSError("no such file")


class Lazy(nn.LazyLinear):
    def __init__(self) -> None:
        super().__init__(3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch.nn.Identity", "Identity has no trained parameters"),
        ("nowhere.Net", "ModuleNotFoundError: No module named 'nowhere'.*importable"),
        ("collections.Counter", "Counter.*a module with trained weights"),
        ("test_plan.Failing", "KeyError: 'x'"),
        ("test_plan.Unreadable", "OSError: no such file"),
        ("test_plan.Lazy", "Attempted to use an uninitialized parameter"),
    ],
)
def test_a_class_that_gives_no_trained_module_is_named_with_the_reason(monkeypatch, name, words):
    for command in ("plan --nodes 2", "bench"):
        with pytest.raises(SystemExit, match=f"{command.split()[0]}: --module {name}: .*{words}"):
            run(monkeypatch, *command.split(), "--module", name, main=main)


def test_a_gpt_is_counted_by_its_name():
    sizes = [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]  # as published
    assert [sum(parameter_sizes(model=name)) for name in GPTS] == sizes


def rows(shown: str) -> dict[str, list[str]]:
    """The cells of the table, by topology."""
    return {name.removesuffix(" (default)"): found for name, found in cells(shown).items()}


def test_the_plan_has_exact_bytes_and_their_least_time_on_the_link(monkeypatch, capsys):
    run(monkeypatch, "plan", "--params", "25M", "--nodes", "4", "--inter", "100mbit", main=main)
    found = rows(capsys.readouterr().out)
    assert [*found] == ["dense (DDP)", "sharded", "single_server", "allgather"]
    sent = volume(TopKConfig(saving=50), ddp_buckets(parameter_sizes(params=25_000_000)), 4)
    exact = [
        format_bytes(sent.sent),
        format_bytes(sent.inter_node),
        format_bytes(sent.inter_node / 30),
        "50.0x",
        "0.0624",
    ]
    assert found["sharded"][:5] == exact, "in 2 x 3 messages for each of 5 buckets"
    assert found["dense (DDP)"][5] == "12,000"  # 1.5 x 100 MB at 12.5 MB a second
    assert float(found["sharded"][5]) == pytest.approx(1000 * sent.inter_node / 12.5e6, rel=1e-3)
    run(monkeypatch, "plan", "--params", "1M", "--nodes", "2", "--gpus-per-node", "2", "--ratio", "0.001", main=main)
    shown = capsys.readouterr().out
    assert "ratio 0.001" in shown
    sent = volume(TopKConfig(ratio=0.001, topology="hierarchical"), [1_000_000], 4, local=2)
    assert rows(shown)["hierarchical"][1] == format_bytes(sent.inter_node)


def test_bytes_are_shown_by_three_digits_in_the_unit_that_these_need():
    several = {0: "0 B", 999.6: "1 kB", 1234: "1.23 kB", 99_960: "100 kB", 999_500: "1 MB", 1e15: "1000 TB"}
    assert {nbytes: format_bytes(nbytes) for nbytes in several} == several


@pytest.mark.parametrize(
    ("parameters", "nodes", "inter", "words"),
    [
        (25_000_000, 4, "1gbit", "A rank sends 30 messages to other nodes."),
        (5_000_000, 8, "1gbit", "A rank sends 14 messages to other nodes."),
        (25_000_000, 512, "10gbit", "each they take 51.1 ms, longer than the bytes. Pass bucket_cap_mb=96 or more."),
        (10, 2, "1gbit", "longer than the bytes. single_server sends"),
        (7 * 10**9, 64, "25gbit", "126,000 messages to other nodes: .* Pass bucket_cap_mb=87 or more."),
    ],
)
def test_the_plan_counts_messages_and_advises_larger_buckets_where_they_take_longer_than_their_bytes(
    parameters, nodes, inter, words
):
    shown = plan(nodes=nodes, gpus_per_node=8 if nodes > 8 else 1, params=parameters, inter=inter)
    assert re.search(words, shown), shown


def test_the_plan_explains_its_columns_where_they_surprise_and_names_ddp_for_a_tiny_model():
    several, one, tiny = (plan(2, gpus, params=params) for gpus, params in ((8, 10**7), (1, 10**7), (1, 9999)))
    assert "the bytes of a node do not. single_server sends fewer entries (density)" in several
    assert "bytes of a node" not in one + tiny
    assert "single_server sends" not in one + tiny
    assert "Use DDP: below 10,000 parameters" in tiny
    assert "Use DDP" not in several + one


@pytest.mark.parametrize(
    ("sizes", "large"),
    [([10**9] * 10, []), ([3 * 10**9], ["single_server", "allgather"])],
    ids=["10 of 10^9", "one of 3 x 10^9"],
)
def test_every_size_has_a_plan_and_topologies_that_do_not_fit_say_so(monkeypatch, sizes, large):
    """A bucket holds at least one parameter, however large."""
    monkeypatch.setattr("lightning_topk.plan.parameter_sizes", lambda *_: sizes)
    shown = plan(nodes=4, gpus_per_node=8, params=1)
    found = rows(shown)
    assert {name for name, cells in found.items() if cells[0] == "too large"} == {*large}
    assert ("more than 2,147,483,647 elements" in shown) == bool(large)
    dense = volume(TopKConfig(topology="dense"), ddp_buckets(sizes), 32, local=8)
    assert found["dense (DDP)"][:2] == [format_bytes(dense.sent), format_bytes(dense.inter_node)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "25e6", "--nodes", "1"], "one rank exchanges nothing"),
        (["--params", "1M", "--nodes", "2", "--inter", "10"], "--inter 10 is not a rate; write it like"),
        (["--params", "1M", "--nodes", "2", "--inter", "1gbit/20ms"], "plan counts bytes, not round trips"),
        (["--params", "1M", "--nodes", "2", "--saving", "50", "--ratio", "0.1"], "both say how much to send"),
        (["--model", "resnet999", "--nodes", "2"], "Unknown model resnet999. The nearest names are .*resnet"),
        (["--model", "", "--nodes", "2"], "--model : ValueError: Unknown model"),
        (["--module", "Net", "--nodes", "2"], "--module Net: .*Write it like mine.models.Net"),
        (["--model", "nothing", "--nodes", "2"], "Use gpt2, gpt2-medium, .*or the name of a torchvision model.$"),
    ],
)
def test_invalid_plans_are_refused(monkeypatch, words, message):
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, "plan", *words, main=main)


def test_plans_and_benches_are_of_one_model(monkeypatch, capsys):
    for words in ("plan --nodes 2", "bench", "bench --params 1M --model resnet18"):
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, *words.split(), main=main)
        said = capsys.readouterr().err
        assert ("not allowed with argument" if "1M" in words else "--model --module --params is required") in said
