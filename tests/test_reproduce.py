"""The reproductions, on a small scale."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from PIL import Image

from lightning_topk import __main__
from lightning_topk.config import TopKConfig
from lightning_topk.core.ops import reference
from lightning_topk.lab import hosts
from lightning_topk.lab.papers import (
    CLAIMS,
    bound,
    convergence,
    counterexample,
    distribution,
    problem,
    recipes,
    report,
    saving,
    speedup,
    tuning,
    variants,
)
from lightning_topk.lab.parallel import run_all
from lightning_topk.lab.plots import Panel
from lightning_topk.lab.report import Check, Result
from lightning_topk.planning.volume import volume
from lightning_topk.simulate import Cluster


def test_parallel_runs_come_back_by_name_and_errors_come_out():
    assert run_all({"b": partial(int, "2"), "a": partial(int, "1")}, "test") == {"b": 2, "a": 1}
    with pytest.raises(ValueError, match="invalid literal"):
        run_all({"a": partial(int, "x")}, "test")


def test_a_learning_rate_at_the_edge_of_its_grid_is_marked():
    tried = {lr: [problem.Run(loss, 90.0, 0, 0)] for lr, loss in ((0.1, 3.0), (0.3, 1.0), (1.0, 2.0))}
    assert convergence.tune(tried) == 0.3
    assert convergence.edge(0.3, tuple(tried)) == "0.3"
    assert convergence.edge(1.0, tuple(tried)) == "1 (edge of the grid)"


def test_equal_bytes_are_not_more_bytes():
    uni = tuning._bytes(TopKConfig(ratio=tuning.RATIO, bidirectional=False))
    ratio = tuning.equal_bytes_ratio()
    assert tuning._bytes(TopKConfig(ratio=ratio)) <= uni < tuning._bytes(TopKConfig(ratio=ratio + 0.001))


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_has_its_command(name):
    assert callable(importlib.import_module(f"lightning_topk.lab.papers.{name}").run)


def test_a_result_is_written_as_text_json_picture_and_report(tmp_path):
    result = Result("bound", "water is wet", "a glass", {"Table": [{"a": 1, "b": 2.34567}, {"a": "x", "b": math.inf}]})
    result.checks = [Check("wet", "yes", "yes", holds=True), Check("dry", "yes", "no", holds=False)]
    result.panels = [Panel("curve", "x", {"y": ([1, 2], [3, 4])}, xlog=True)]
    result.write(tmp_path)
    report(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "1 of 2 statements hold" in page
    assert "| FAIL | dry" in page
    assert "| 1 | 2.346 |" in page
    assert Result.read(tmp_path / "bound.json").text() == result.text()
    json.loads((tmp_path / "bound.json").read_text(), parse_constant=pytest.fail)  # infinity is not JSON
    assert (tmp_path / "bound.png").stat().st_size > 1000


@pytest.mark.parametrize("model", ["mlp", "wide mlp", "cnn", "lstm"])
def test_simulated_training_learns(model):
    start = problem.Problem(model, seed=0)
    before, _ = start.evaluate(start.start)
    run = problem.train(model, TopKConfig(ratio=0.1), 2, 30, problem.Optimizer(0.3), seed=0)
    assert run.loss < before
    assert len(run.union) == 30
    sent = volume(TopKConfig(ratio=0.1), [len(start.start)], world=2)
    assert (run.uplink_bytes, run.downlink_bytes) == (sent.uplink, sent.downlink)


def test_simulated_gradients_are_autograds():
    mlp = problem.Problem("mlp", seed=0)
    batches = torch.tensor([[0, 1, 2], [3, 4, 5]])
    images, labels = problem.digits().examples, problem.digits().labels
    for batch, gradient in zip(batches, mlp.gradients(mlp.start, batches), strict=True):
        mlp.net.zero_grad()
        torch.nn.functional.cross_entropy(mlp.net(images[batch]), labels[batch]).backward()
        expected = torch.cat([p.grad.flatten() for p in mlp.parameters])
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


@pytest.fixture
def images(tmp_path):
    """A folder of ten classes, one image of each to train on and one held out."""
    for part in ("train", "test"):
        for number, name in enumerate("abcdefghij"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (32, 32), (25 * number, 120, 250 - 25 * number)).save(tmp_path / part / name / "0.png")
    return tmp_path


def test_a_resnet_learns_from_a_folder_of_images(images):
    data = problem.image_folder(images)
    assert data.examples.shape == data.held_examples.shape == (10, 3, 32, 32)
    before, _ = problem.Problem("resnet20", 0, data).evaluate(problem.Problem("resnet20", 0, data).start)
    run = problem.train("resnet20", TopKConfig(ratio=0.1), 2, 25, problem.Optimizer(0.05), 0, 5, images=images)
    assert run.loss < before


@pytest.mark.slow
def test_convergence_runs_on_a_folder_of_images(images, monkeypatch):
    for name, value in {
        "GRID": (0.1,),
        "SEEDS": 1,
        "SYSTEMS": ("dense", "topk", "bidirectional_topk", "randk"),
    }.items():
        monkeypatch.setattr(convergence, name, value)
    monkeypatch.setattr(convergence, "COMPARED", ("topk", "bidirectional_topk"))
    monkeypatch.setattr(convergence, "_thesis_rows", lambda result: None)
    result = convergence.run(images, steps=2)
    assert "Images, resnet20 (d = 269,722)" in result.setting
    rows = result.tables["Every system at its best learning rate"]
    assert [row["system"] for row in rows] == ["dense", "topk", "bidirectional_topk", "randk"]
    assert rows[0]["lr"] == "0.1 (edge of the grid)"
    assert len(result.checks) == 3


def test_opposite_workers_favour_the_second_compression():
    gaps = {
        system: counterexample.descend("opposites", 0, system, lr=0.1, steps=800)[-100:].mean()
        for system in ("uni", "bi")
    }
    assert gaps["uni"] > 5 * gaps["bi"]


def test_the_toys_gap_is_the_papers_objective_minus_its_least_value():
    x = torch.randn(100, dtype=torch.float64)
    objective = sum((x - a).square().sum() / 2 for a in (1.0, 5.0, 10.0)) / 3
    assert counterexample.toy_gap(x) == pytest.approx(float(objective) - 677.7778, rel=1e-6)
    assert torch.allclose(sum(counterexample.toy(x)) / 3, x - 16 / 3)


def test_the_error_of_sign_vectors_is_the_general_bound():
    assert bound.error(torch.ones(1000), 0.1) == pytest.approx(0.9)
    assert bound.error(torch.tensor([3.0, 4.0]), 0.5) == pytest.approx(9 / 25)


def test_the_union_of_two_selections_is_at_most_twice_one():
    k = TopKConfig(ratio=0.01).codecs(4810, 1)[1].kept
    assert k <= saving._union("mlp", 0.01, 2) <= 2 * k
    assert saving._slope({2: 6.0, 4: 12.0, 8: 24.0, 16: 24.0}, up_to=8) == pytest.approx(1.0)


def test_the_shape_of_known_vectors():
    normal = distribution.statistics(torch.randn(100_000, generator=torch.Generator().manual_seed(0)).double())
    assert normal["kurtosis"] == pytest.approx(3, abs=0.1)
    assert normal["π² below the line"] > 0.999
    signs = distribution.statistics(torch.ones(1000).double() * torch.arange(1000).remainder(2).mul(2).sub(1))
    assert signs["π² below the line"] < 0.01


def test_speedups_are_modelled_where_hosts_cannot_be_made(monkeypatch):
    monkeypatch.setattr(hosts, "available", lambda: False)
    monkeypatch.setattr(speedup, "NUMEL", 100_000)
    result = speedup.run()
    assert "MODELLED" in result.setting
    assert all(
        isinstance(value, float) for row in result.tables["Seconds of a step"] for value in list(row.values())[1:]
    )


@pytest.mark.skipif(not hosts.available(), reason="emulated hosts need root and iproute2")
def test_predicted_bytes_are_those_that_leave_the_interface():
    numel, world, steps = 400_000, 3, 3
    try:
        with hosts.emulate(world, "1gbit") as group:
            before = group.sent_bytes()
            outputs = group.run("lightning_topk.lab.papers.step", str(numel), "bidirectional_topk", timeout=120)
            sent = [now - then for now, then in zip(group.sent_bytes(), before, strict=True)]
    except RuntimeError as error:  # a container may be root without the right to make namespaces
        pytest.skip(f"no network namespaces here: {error}")
    plan = volume(TopKConfig(), [numel], world)
    for output, seen in zip(outputs, sent, strict=True):
        assert json.loads(output)["bidirectional_topk"]["bytes"] == plan.uplink + plan.downlink
        payload = steps * (plan.uplink + plan.downlink)
        assert payload < seen < payload * 1.1 + 60_000  # gloo's set-up and TCP's headers
    left = subprocess.check_output(["ip", "netns", "list"], text=True).split()
    assert not {*group.names, f"ltk{os.getpid() % 100000}s"} & set(left)


def test_recipes_go_on_where_they_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "TASKS", (recipes.Task("mlp", 2, 10, 0.1),))
    monkeypatch.setattr(recipes, "run_all", alone)
    first = recipes.run(out=tmp_path, seeds=1)
    assert len((tmp_path / "recipes.jsonl").read_text().splitlines()) == len(recipes.RECIPES)
    monkeypatch.setattr(recipes, "run_all", lambda jobs, *_: {} if not jobs else pytest.fail(f"again: {list(jobs)}"))
    assert recipes.run(out=tmp_path, seeds=1).tables == first.tables
    (rows,) = first.tables.values()
    saving = {row["recipe"]: float(row["saving"].rstrip("x")) for row in rows}
    assert saving["dense"] == 1 < saving["PowerSGD 4"] < saving["PowerSGD 1"] < saving["default"] < saving["plain"]
    for name, factor in saving.items():
        if name.endswith("equal bytes") and "all-gather" not in name:  # few entries make a coarse scale
            assert factor == pytest.approx(saving["default"], rel=0.35), name
    only = recipes.run(out=tmp_path, models=["mlp"], recipes=["plain"], seeds=1)
    assert [row["recipe"] for row in next(iter(only.tables.values()))] == ["dense", "plain"]
    monkeypatch.setattr(recipes, "run_all", alone)
    monkeypatch.setitem(recipes.RECIPES, "plain", recipes.Recipe({"recipe": "plain", "wire": "fp32"}))
    other = recipes.run(out=tmp_path, models=["mlp"], recipes=["plain"], seeds=1)
    assert other.tables != only.tables, "a run of other settings passed for this"
    titles = recipes.run(out=tmp_path, recipes=["plain"], seeds=1, steps=5, lr=0.2, workers=[3, 4]).tables
    assert [words in title for title in titles for words in ("5 steps", "lr 0.2")] == 4 * [True]
    assert [title.split(", ")[1] for title in titles] == ["3 workers", "4 workers"]
    with pytest.raises(ValueError, match="there is no nothing here: models are mlp, recipes dense"):
        recipes.run(out=tmp_path, recipes=["nothing"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "seeds=0 must be at least 1"),
        (["--lr", "-1"], "lr=-1.0 must be positive"),
        (["--workers", "8", "1"], r"workers=\[8, 1\] must be at least 2 each"),
        (["--models", "vgg"], "there is no vgg here: models are"),
    ],
)
def test_what_recipes_cannot_do_is_said_in_a_sentence(monkeypatch, tmp_path, words, message):
    monkeypatch.setattr(sys, "argv", ["lightning_topk", "reproduce", "recipes", "--out", str(tmp_path), *words])
    with pytest.raises(SystemExit, match=f"reproduce recipes: {message}"):
        __main__.main()


@pytest.mark.parametrize("model", ["char lstm", "gpt"])
def test_models_of_text_learn_from_pythons_documentation(model):
    start = problem.Problem(model, seed=0)
    assert start.data.examples.shape[1:] == start.data.labels.shape[1:] == (64,)
    assert torch.equal(start.data.examples[0, 1:], start.data.labels[0, :-1])
    before = start.held_loss(start.start)
    optimizer = problem.Optimizer(0.01, 0.9, adamw=True, cosine=True, clip_norm=1.0)
    assert problem.train(model, TopKConfig(ratio=0.1), 2, 15, optimizer, seed=0, batch=4).held_loss < before


def test_text_sees_no_future():
    gpt = problem.Problem("gpt", seed=0)
    text = gpt.data.examples[:1].clone()
    before = gpt.net(text)
    text[0, 40] += 1
    after = gpt.net(text)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def drawn(world, numel):
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(numel, generator=generator) for _ in range(world)] for _ in range(12)]


@pytest.mark.parametrize("world", [2, 3])
def test_own_shards_lose_nothing(world):
    numel = 1000
    cluster = variants.OwnShards(TopKConfig(ratio=0.05, wire="fp32"), world, numel)
    steps = drawn(world, numel)
    delivered = sum(cluster.step(gradients)[0] for gradients in steps)
    kept = sum(end.uplink.memory.residual for end in cluster.endpoints) / world
    rows = torch.stack([end.downlink.memory.residual for end in cluster.endpoints])
    place = reference.shard_rows(torch.arange(1, numel + 1), cluster.endpoints[0].layout)
    kept[place[place > 0] - 1] += rows[place > 0]
    given = sum(torch.stack(gradients).mean(0) for gradients in steps)
    torch.testing.assert_close(delivered + kept, given, atol=1e-4, rtol=1e-4)


def test_differences_of_all_entries_are_the_averaged_gradient():
    cluster = variants.Differences(TopKConfig(ratio=1.0, wire="fp32"), 2, 500, new=0.25)
    average = torch.zeros(500)
    for gradients in drawn(2, 500):
        average += 0.25 * (torch.stack(gradients).mean(0) - average)
        torch.testing.assert_close(cluster.step(gradients)[0], average, atol=1e-5, rtol=1e-4)


def test_decay_forgets_and_an_adaptive_ratio_follows_its_target():
    decaying = variants.Decaying(TopKConfig(ratio=0.05), 2, 1000, factor=0.0)
    plain = Cluster(TopKConfig(ratio=0.05, error_feedback=False), 2, 1000)
    adaptive = variants.Adaptive(TopKConfig(ratio=0.001), 2, 1000, target=0.99)
    for gradients in drawn(2, 1000):
        assert torch.equal(decaying.step(gradients)[0], plain.step(gradients)[0])
        adaptive.step(gradients)
    assert adaptive.ratio == pytest.approx(0.1 / 1.05**12)


def test_power_sgd_is_exact_on_matrices_of_its_rank_and_on_vectors():
    torch.manual_seed(0)
    cluster = variants.PowerSGD(TopKConfig(topology="dense"), 2, 48 + 6, rank=2, shapes=[(8, 6), (6,)])
    exact = torch.randn(8, 1) @ torch.randn(1, 6)
    gradients = [torch.cat([exact.flatten() * (1 + rank), torch.full((6,), float(rank))]) for rank in range(2)]
    for _ in range(3):
        delivered = cluster.step(gradients)
    torch.testing.assert_close(delivered[0], torch.stack(gradients).mean(0), atol=1e-4, rtol=1e-4)
    assert cluster.sent_bytes["uplink"] == [3 * 4 * (2 * (8 + 6) + 6)] * 2
    noise = drawn(2, 54)
    lossy = variants.PowerSGD(TopKConfig(topology="dense"), 2, 54, rank=1, shapes=[(8, 6), (6,)])
    total = sum(lossy.step(gradients)[0] for gradients in noise)
    given = sum(torch.stack(gradients).mean(0) for gradients in noise)
    torch.testing.assert_close(total + lossy.residual.mean(0), given, atol=1e-4, rtol=1e-4)  # error feedback


def alone(jobs, title, note):
    """Runs jobs here: what they were told by a test is not told to other processes."""
    for key, job in jobs.items():
        note(key, job())


def test_the_command_wants_a_name():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_topk", "reproduce"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "counterexample" in done.stderr
